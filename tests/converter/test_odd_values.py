"""Whatever stands in a checkpoint's JSON files: a plan or one sentence, never a traceback."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from limpet.converter.errors import ConversionError
from limpet.converter.plan import Options, make_plan
from tests.converter.checkpoints import edit_json, write_gguf
from tests.converter.families import build, write_folder, write_meta_folder
from tests.converter.vocabularies import write_sentencepiece_model

ODD_VALUES = (None, True, -1, 0, 2**70, 1.5, float("nan"), "", "x", [], [None], {"a": 1}, {"content": 5})
GGUF_ODD_VALUES = (
    None,
    (gguf.GGUFValueType.INT32, -1),
    (gguf.GGUFValueType.UINT32, 2**31 - 1),
    (gguf.GGUFValueType.FLOAT32, float("nan")),
    (gguf.GGUFValueType.STRING, "a:b c"),
    (gguf.GGUFValueType.ARRAY, ["", "a b"]),
    (gguf.GGUFValueType.ARRAY, [-1, 7]),
)
HF_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Hugging Face folder whose JSON files have every key that is read, and a Meta folder inside."""
    source = tmp_path / "source"
    write_folder(source, build("rope-yarn"))
    (source / "chat_template.jinja").unlink()
    token = {"content": "</s>", "special": True}
    absent = ("quantization_config", "rope_scaling", "layer_types", "sliding_window", "partial_rotary_factor")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | dict.fromkeys(absent)))
    edit_json(source / "generation_config.json", temperature=0.5, top_k=5, top_p=0.5)
    edit_json(source / "tokenizer_config.json", chat_template=[{"name": "default", "template": "x"}])
    edit_json(source / "tokenizer_config.json", added_tokens_decoder={"261": {"content": "<x>"}}, add_bos_token=True)
    (source / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": token}))
    (source / "added_tokens.json").write_text(json.dumps({"<x>": 261}))
    return source


def odd_versions(value: Any) -> Iterator[Any]:
    """The value with each of its parts, at any depth, replaced by each odd value."""
    yield from ODD_VALUES
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(parts):
        for odd in odd_versions(part):
            changed = value.copy()
            changed[key] = odd
            yield changed


def plan_all(file: Path, source: Path, workspace: Path) -> int:
    """Try every odd version of the file; returns how many were refused."""
    refused = 0
    for version in odd_versions(json.loads(file.read_text())):
        file.write_text(json.dumps(version))
        with contextlib.suppress(ConversionError):
            make_plan(Options(source=source, workspace=workspace, name="model"))
            continue
        refused += 1
    return refused


@pytest.mark.parametrize("name", HF_FILES)
def test_odd_values_in_a_hugging_face_folder_never_end_in_a_traceback(tmp_path: Path, source: Path, name: str) -> None:
    make_plan(Options(source=source, workspace=tmp_path, name="model"))
    assert plan_all(source / name, source, tmp_path) > 10


def test_odd_values_in_tokenizer_json_never_end_in_a_traceback(tmp_path: Path, source: Path) -> None:
    tokenizer = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2, "</s>": 3}, [("a", "b")]))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Prepend("b"), pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 4)])
    tokenizer.save(str(source / "tokenizer.json"))
    for name in ("added_tokens.json", "tokenizer_config.json"):
        (source / name).unlink()
    make_plan(Options(source=source, workspace=tmp_path, name="model"))
    assert plan_all(source / "tokenizer.json", source, tmp_path) > 100


def test_odd_metadata_of_a_gguf_file_never_ends_in_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "source.gguf"
    write_gguf(path, build("rope-yarn"))
    make_plan(Options(source=path, workspace=tmp_path, name="model"))
    whole = gguf.GGUFReader(path)
    refused = 0
    for key in (key for key in whole.fields if not key.startswith("GGUF.")):
        for odd in GGUF_ODD_VALUES:
            rewrite_metadata(tmp_path / "odd.gguf", whole, key, odd)
            with contextlib.suppress(ConversionError):
                make_plan(Options(source=tmp_path / "odd.gguf", workspace=tmp_path, name="model"))
                continue
            refused += 1
    assert refused > 50


def rewrite_metadata(path: Path, whole: gguf.GGUFReader, changed: str, odd: Any) -> None:
    """The file with one key's value another one; None: without the key."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, field in whole.fields.items():
        if key == changed and odd is not None:
            writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(odd[1], odd[0])
        elif key != changed and not key.startswith("GGUF."):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(field.contents(), field.types[0], inner)
    if changed == "general.architecture" and odd is None:
        del writer.kv_data[0][changed]
    for tensor in whole.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_odd_values_in_a_meta_folder_never_end_in_a_traceback(tmp_path: Path) -> None:
    write_meta_folder(tmp_path / "meta", build("meta"), write_sentencepiece_model(tmp_path / "vocabulary"), 1)
    make_plan(Options(source=tmp_path / "meta", workspace=tmp_path, name="model"))
    assert plan_all(tmp_path / "meta/params.json", tmp_path / "meta", tmp_path) > 10
