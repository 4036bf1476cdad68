"""GGUF files: the numbers are the gguf library's, the q and k rows are back in half-split order."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from limpet.backend.checkpoint import CheckpointDir
from limpet.converter.cli import main
from limpet.converter.gguf_file import GGUFFile
from limpet.converter.gguf_source import open_gguf
from tests.aids.repositories import SMOLLM2_GGUF
from tests.aids.tiny import build_tiny, write_tiny
from tests.converter.checkpoints import add_tiny_tokenizer, converted_weights, run_convert, write_gguf
from tests.converter.pbtxt import read_parameters

DEQUANTISABLE = sorted(gguf.quants._type_traits, key=lambda kind: kind.name)


@pytest.mark.parametrize("shape", ["grouped-query", "tied", "biases", "wide-heads"])
def test_gguf_and_safetensors_of_the_same_model_give_the_same_weights(tmp_path: Path, shape: str) -> None:
    model = write_tiny(tmp_path / "folder", shape)
    write_gguf(tmp_path / "tiny.gguf", model)
    folder = run_convert(tmp_path / "folder", tmp_path / "a")
    file = run_convert(tmp_path / "tiny.gguf", tmp_path / "b")
    expected, found = converted_weights(folder), converted_weights(file)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_gguf_and_safetensors_of_the_same_model_give_the_same_settings(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "folder")
    write_gguf(tmp_path / "tiny.gguf", model)
    folder = run_convert(tmp_path / "folder", tmp_path / "a")
    file = run_convert(tmp_path / "tiny.gguf", tmp_path / "b")
    names = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "rope_theta", "rms_norm_eps")
    for name in (*names, "max_position_embeddings", "intermediate_size", "eos_token_ids", "bos_token_id"):
        assert getattr(file.model_config(), name) == getattr(folder.model_config(), name), name
    assert file.tokenizer_config() == folder.tokenizer_config()
    assert file.chat_template() == folder.chat_template()


@pytest.mark.parametrize(("options", "dtype"), [([], "float32"), (["--dtype", "bfloat16"], "bfloat16")])
def test_weights_of_a_gguf_file_are_float32_unless_told_otherwise(
    tmp_path: Path, options: list[str], dtype: str
) -> None:
    write_gguf(tmp_path / "tiny.gguf", build_tiny(), quantisation=gguf.GGMLQuantizationType.F16)
    checkpoint = run_convert(tmp_path / "tiny.gguf", tmp_path, *options)
    assert checkpoint.model_config().dtype == dtype
    assert {tensor.dtype for tensor in converted_weights(checkpoint).values()} == {getattr(torch, dtype)}


def test_sliding_window_of_a_gguf_file_caps_the_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "tiny.gguf", build_tiny(), metadata={"attention.sliding_window": 128})
    checkpoint = run_convert(tmp_path / "tiny.gguf", tmp_path)
    assert read_parameters((checkpoint.root / "config.pbtxt").read_text("utf-8"))["session_len"] == "128"
    assert "session_len is set to 128" in capsys.readouterr().err


MISTRAL_V01 = {
    "context_length": 32768,
    "embedding_length": 4096,
    "block_count": 32,
    "feed_forward_length": 14336,
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
    "rope.freq_base": 10000.0,
}


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, 4096),
        ({"rope.freq_base": 1e6}, None),  # v0.2
        ({"rope.freq_base": 500000.0}, None),  # Llama 3 8B
        ({"block_count": 40}, None),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0}, None),  # trained for a longer one
        ({"attention.sliding_window": 512}, 512),
    ],
    ids=lambda value: next(iter(value), "as it is") if isinstance(value, dict) else "",
)
def test_mistral_7b_v01_has_its_window_though_its_gguf_files_do_not_state_it(
    tmp_path: Path, changes: dict[str, float | str], window: int | None
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "mistral.gguf", "llama")
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (MISTRAL_V01 | changes).items():
        add[type(value)](f"llama.{key}", value)
    add_tiny_tokenizer(writer, ())
    for number in range(50):
        writer.add_tensor("token_embd.weight" if number == 0 else str(number), np.zeros((2, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = open_gguf(tmp_path / "mistral.gguf")
    assert source.config.sliding_window == window
    assert bool(source.warnings) == (window == 4096)


def test_unknown_scaling_of_a_gguf_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "tiny.gguf", build_tiny(), metadata={"rope.scaling.type": "longrope"})
    assert main([str(tmp_path / "tiny.gguf"), "--dst", str(tmp_path)]) == 1
    assert "rope scaling 'longrope' is not supported" in capsys.readouterr().err


def test_linear_scaling_under_its_old_key_counts(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", build_tiny(), metadata={"rope.scale_linear": 4.0})
    scaling = run_convert(tmp_path / "tiny.gguf", tmp_path).model_config().rope_scaling
    assert scaling is not None
    assert (scaling.rope_type, scaling.factor) == ("linear", 4.0)


def test_yarn_takes_the_ramp_of_the_file(tmp_path: Path) -> None:
    ramp = {"rope.scaling.yarn_beta_fast": 4.0, "rope.scaling.yarn_beta_slow": 2.0}
    write_gguf(tmp_path / "tiny.gguf", _yarn_model(), metadata=ramp)
    scaling = run_convert(tmp_path / "tiny.gguf", tmp_path).model_config().rope_scaling
    assert scaling is not None
    assert (scaling.rope_type, scaling.factor, scaling.beta_fast, scaling.beta_slow) == ("yarn", 8.0, 4.0, 2.0)


@pytest.mark.parametrize("name", ["attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"])
def test_yarn_in_a_way_of_llama_cpps_own_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "tiny.gguf", _yarn_model(), metadata={f"rope.scaling.{name}": 1.5})
    assert main([str(tmp_path / "tiny.gguf"), f"--dst={tmp_path}"]) == 1
    assert f"rope.scaling.{name} is 1.5: not supported" in capsys.readouterr().err.replace("\n", " ")


def _yarn_model() -> PreTrainedModel:
    model = build_tiny()
    model.config.rope_parameters = {
        "rope_type": "yarn",
        "factor": 8.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
    }
    return model


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_architectures_that_gguf_leaves_in_half_split_order_are_not_reordered(
    tmp_path: Path, architecture: str
) -> None:
    model = build_tiny()
    write_gguf(tmp_path / "tiny.gguf", model, architecture)
    found = converted_weights(run_convert(tmp_path / "tiny.gguf", tmp_path))["layers.1.qkv_proj.weight"]
    query = model.state_dict()["model.layers.1.self_attn.q_proj.weight"]
    assert torch.equal(found[: len(query)], query)


@pytest.mark.parametrize("kind", DEQUANTISABLE, ids=lambda kind: kind.name)
def test_quantised_tensors_are_dequantised_by_the_library_to_the_bit(
    tmp_path: Path, kind: gguf.GGMLQuantizationType
) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(0).integers(0, 256, (3, 1024 // block * block_bytes), dtype=np.uint8)
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("other.weight", np.ones(5, dtype=np.float32))
    writer.add_tensor("some.weight", rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):  # random bytes are also NaN and infinity
        found = GGUFFile(path).read("some.weight").numpy()
        assert found.shape == (3, 1024)
        assert np.array_equal(found, gguf.quants.dequantize(rows, kind), equal_nan=True)


@pytest.mark.parametrize("opened", [1, 2, 3])
def test_split_gguf_is_read_whole_whichever_part_is_named(tmp_path: Path, opened: int) -> None:
    model = build_tiny()
    write_gguf(tmp_path / "whole.gguf", model)
    write_gguf(tmp_path / "parts.gguf", model, split_max_tensors=8)
    whole = converted_weights(run_convert(tmp_path / "whole.gguf", tmp_path / "a"))
    parts = converted_weights(run_convert(tmp_path / f"parts-0000{opened}-of-00003.gguf", tmp_path / "b"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_ending_in_capitals_is_a_gguf_file_too(tmp_path: Path) -> None:
    write_gguf(tmp_path / "parts.gguf", build_tiny(), split_max_tensors=12)
    for part in tmp_path.glob("*.gguf"):
        part.rename(part.with_suffix(".GGUF"))
    run_convert(tmp_path / "parts-00002-of-00002.GGUF", tmp_path)


@pytest.mark.parametrize("is_split", [False, True])
def test_folder_with_one_gguf_model_is_that_model(tmp_path: Path, is_split: bool) -> None:
    write_tiny(tmp_path / "source")
    (tmp_path / "source/model.safetensors").unlink()  # a configuration beside it counts for nothing
    write_gguf(tmp_path / "source/tiny.gguf", build_tiny(), split_max_tensors=8 if is_split else 0)
    assert main([str(tmp_path / "source"), "--dst", str(tmp_path)]) == 0
    assert CheckpointDir(tmp_path / "model_repository/tiny").manifest().source.startswith("GGUF file")


def test_folder_with_several_gguf_models_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.Q4.gguf", "b.Q8.gguf"):
        write_gguf(tmp_path / name, build_tiny())
    assert main([str(tmp_path), "--dst", str(tmp_path)]) == 1
    assert "several GGUF models (a.Q4.gguf, b.Q8.gguf)" in capsys.readouterr().err


def test_gguf_files_beside_a_whole_folder_are_left_alone(tmp_path: Path) -> None:
    write_tiny(tmp_path / "source")
    (tmp_path / "source/other.gguf").write_bytes(b"")
    assert run_convert(tmp_path / "source", tmp_path).manifest().source.startswith("Hugging Face folder")


def test_split_gguf_without_a_part_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "parts.gguf", build_tiny(), split_max_tensors=8)
    (tmp_path / "parts-00002-of-00003.gguf").unlink()
    assert main([str(tmp_path / "parts-00001-of-00003.gguf"), "--dst", str(tmp_path)]) == 1
    assert "parts-00002-of-00003.gguf, a part of the model, is missing" in capsys.readouterr().err


def test_gguf_without_pre_tokenizer_mark_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "old.gguf", build_tiny(), leave_out=("pre",))
    assert main([str(tmp_path / "old.gguf"), "--dst", str(tmp_path)]) == 1
    assert "tokenizer.ggml.pre" in capsys.readouterr().err


def test_gguf_without_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "bare.gguf", build_tiny(), leave_out=("tokenizer", "pre"))
    assert main([str(tmp_path / "bare.gguf"), "--dst", str(tmp_path)]) == 1
    assert "no tokenizer" in capsys.readouterr().err


def test_gguf_of_another_architecture_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "other.gguf", build_tiny(), "gemma2")
    assert main([str(tmp_path / "other.gguf"), "--dst", str(tmp_path)]) == 1
    assert "'gemma2' is not supported" in capsys.readouterr().err


@pytest.mark.parametrize("share", [0.001, 0.02, 0.3, 0.99])
def test_cut_gguf_is_refused(tmp_path: Path, share: float, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cut.gguf"
    write_gguf(path, build_tiny())
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * share))
    assert main([str(path), "--dst", str(tmp_path)]) == 1
    assert "cut short" in capsys.readouterr().err.replace("\n", " ")


def test_gguf_of_a_damaged_length_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "damaged.gguf"
    write_gguf(path, build_tiny())
    data = bytearray(path.read_bytes())
    array = data.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8
    assert int.from_bytes(data[array : array + 8], "little") == 261  # of tokens
    data[array + 5] = 1  # 2**40 more
    path.write_bytes(data)
    assert main([str(path), "--dst", str(tmp_path)]) == 1
    assert "damaged or cut short" in capsys.readouterr().err


def test_smollm2_weights_are_its_dequantised_tensors_with_q_and_k_back_in_order(smollm2_dir: Path) -> None:
    weights = converted_weights(CheckpointDir(smollm2_dir))
    source = {tensor.name: tensor for tensor in gguf.GGUFReader(SMOLLM2_GGUF).tensors}

    def values(name: str) -> np.ndarray:
        return gguf.quants.dequantize(source[name].data, source[name].tensor_type)

    def half_split(rows: np.ndarray, num_heads: int) -> np.ndarray:
        order = [64 * head + 2 * pair + odd for head in range(num_heads) for odd in (0, 1) for pair in range(32)]
        return rows[order]

    for layer in (0, 29):
        block = f"blk.{layer}."
        query, key = half_split(values(f"{block}attn_q.weight"), 9), half_split(values(f"{block}attn_k.weight"), 3)
        qkv = np.concatenate([query, key, values(f"{block}attn_v.weight")])
        assert np.array_equal(weights[f"layers.{layer}.qkv_proj.weight"].numpy(), qkv)
        gate_up = np.concatenate([values(f"{block}ffn_gate.weight"), values(f"{block}ffn_up.weight")])
        assert np.array_equal(weights[f"layers.{layer}.gate_up_proj.weight"].numpy(), gate_up)
    assert np.array_equal(weights["embed_tokens.weight"].numpy(), values("token_embd.weight"))
    assert len(weights) == 2 + 30 * 6
