"""Every architecture from every layout: transformers' ids after a real load and an answer through the engine."""

from pathlib import Path

import gguf
import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from tests.aids.deepseek import write_deepseek
from tests.aids.transformers_reference import greedy_reference
from tests.converter.checkpoints import converted_weights, edit_json, run_convert, write_gguf
from tests.converter.families import (
    FAMILIES,
    HF_LAYOUTS,
    NUM_TOKENS,
    PROMPTS,
    assert_engine_gives_transformers_ids,
    build,
    store_as,
    write_folder,
    write_internlm2_folder,
    write_meta_folder,
)
from tests.converter.vocabularies import write_sentencepiece_model, write_tiktoken_model


@pytest.mark.parametrize("family", FAMILIES)
def test_safetensors_folder(tmp_path: Path, family: str) -> None:
    model = build(family)
    write_folder(tmp_path / "source", model)
    assert_engine_gives_transformers_ids(run_convert(tmp_path / "source", tmp_path).root, model)


def _write_architecture(folder: Path, architecture: str) -> PreTrainedModel:
    if architecture == "deepseek-v2":
        return write_deepseek(folder, "lite")
    model = build("llama-attention-biases" if architecture == "internlm2" else architecture)
    (write_internlm2_folder if architecture == "internlm2" else write_folder)(folder, model)
    return model


@pytest.mark.parametrize("architecture", ["llama-2", "mistral", "qwen2-tied", "qwen3", "internlm2", "deepseek-v2"])
@pytest.mark.parametrize("layout", HF_LAYOUTS[1:])  # the first is every other test's
def test_every_layout_of_a_hugging_face_folder(tmp_path: Path, architecture: str, layout: str) -> None:
    model = _write_architecture(tmp_path / "source", architecture)
    store_as(tmp_path / "source", layout)
    assert_engine_gives_transformers_ids(run_convert(tmp_path / "source", tmp_path).root, model)


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("llama-1", "llama"),
        ("llama-2", "internlm2"),
        ("llama-2", "llama"),
        ("llama-3.1", "llama"),
        ("llama-3.2", "llama"),
        ("llama-biases", "llama"),
        ("llama-odd-vocabulary", "llama"),
        ("rope-linear", "llama"),
        ("rope-yarn", "llama"),
        ("mistral", "llama"),
        ("qwen2", "qwen2"),
        ("qwen2-tied", "qwen2"),
        ("qwen3", "qwen3"),
    ],
)
def test_gguf_file(tmp_path: Path, family: str, architecture: str) -> None:
    model = build(family)
    write_gguf(tmp_path / "source.gguf", model, architecture)
    assert_engine_gives_transformers_ids(run_convert(tmp_path / "source.gguf", tmp_path).root, model)


def test_gguf_of_quantised_weights_answers_as_the_dequantised_model(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    model = build("quantisable")
    write_gguf(tmp_path / "source.gguf", model, quantisation=kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                rows = gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(rows))
    assert_engine_gives_transformers_ids(run_convert(tmp_path / "source.gguf", tmp_path).root, model)


@pytest.mark.parametrize("family", ["llama-1", "llama-2", "llama-tied", "rope-dynamic"])
def test_internlm2_folder(tmp_path: Path, family: str) -> None:
    model = build(family)
    write_internlm2_folder(tmp_path / "source", model)
    assert_engine_gives_transformers_ids(run_convert(tmp_path / "source", tmp_path).root, model)


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("layout", ["flat", "nested", "embedding by rows"])
def test_meta_folder(tmp_path: Path, num_parts: int, layout: str) -> None:
    model = build("meta")
    source = tmp_path / "source"
    folder = source / "7B" if layout == "nested" else source
    tokenizer = write_sentencepiece_model(tmp_path / "tokenizer.model")
    write_meta_folder(folder, model, tokenizer, num_parts, embedding_by_rows=layout == "embedding by rows")
    if layout == "nested":
        (folder / "tokenizer.model").rename(source / "tokenizer.model")
    assert_engine_gives_transformers_ids(run_convert(source, tmp_path).root, model)


def test_meta_folder_of_llama3(tmp_path: Path) -> None:
    model = build("llama-3-meta")
    write_tiktoken_model(tmp_path / "vocabulary")
    write_meta_folder(
        tmp_path / "source", model, tmp_path / "vocabulary", 2, embedding_by_rows=True, rope_theta=500000.0
    )
    assert_engine_gives_transformers_ids(run_convert(tmp_path / "source", tmp_path).root, model)


@pytest.mark.parametrize(("family", "num_parts"), [("llama-3.1-meta", 2), ("llama-3.2-meta", 1)])
def test_meta_folder_of_llama3_with_scaled_rope(tmp_path: Path, family: str, num_parts: int) -> None:
    model = build(family)
    write_tiktoken_model(tmp_path / "tokenizer.model")
    write_meta_folder(
        tmp_path / "source",
        model,
        tmp_path / "tokenizer.model",
        num_parts,
        embedding_by_rows=True,
        rope_theta=500000.0,
        use_scaled_rope=True,
    )
    checkpoint = run_convert(tmp_path / "source", tmp_path)
    assert_engine_gives_transformers_ids(checkpoint.root, model)
    # The scaling shows within these prompts: without it the ids would be others.
    plain = type(model)(
        LlamaConfig(**model.config.to_dict() | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}})
    )
    plain.load_state_dict(model.state_dict())
    assert greedy_reference(plain, PROMPTS[-1], NUM_TOKENS).ids != greedy_reference(model, PROMPTS[-1], NUM_TOKENS).ids


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
        {"type": "linear", "rope_type": "linear", "factor": 4.0},
    ],
)
def test_every_spelling_of_rope_scaling_is_the_same(tmp_path: Path, scaling: dict[str, object]) -> None:
    model = build("rope-linear")
    write_folder(tmp_path / "source", model)
    edit_json(tmp_path / "source/config.json", rope_parameters=None, rope_theta=10000.0, rope_scaling=scaling)
    assert_engine_gives_transformers_ids(run_convert(tmp_path / "source", tmp_path).root, model)


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}, {"type": "default"}])
def test_empty_rope_scaling_is_none(tmp_path: Path, scaling: dict[str, object] | None) -> None:
    model = build("llama-2")
    write_folder(tmp_path / "source", model)
    edit_json(tmp_path / "source/config.json", rope_parameters=None, rope_theta=10000.0, rope_scaling=scaling)
    assert_engine_gives_transformers_ids(run_convert(tmp_path / "source", tmp_path).root, model)


def test_linked_weights_answer_like_copied_ones(tmp_path: Path) -> None:
    model = build("llama-2")
    write_folder(tmp_path / "source", model, max_shard_size="20KB")
    checkpoint = run_convert(tmp_path / "source", tmp_path, "--link")
    linked = [path for path in checkpoint.weight_files() if path.name.startswith("linked-")]
    assert linked
    assert all(path.stat().st_nlink == 2 for path in linked)
    assert_engine_gives_transformers_ids(checkpoint.root, model)


def test_link_writes_only_what_must_be_reshaped(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", build("llama-2"))
    checkpoint = run_convert(tmp_path / "source", tmp_path, "--link")
    written = [path for path in checkpoint.weight_files() if not path.name.startswith("linked-")]
    names = {name.split(".")[2] for name in converted_weights(checkpoint) if name.startswith("layers.")}
    assert len(written) == 1
    assert {"qkv_proj", "gate_up_proj"} <= names
