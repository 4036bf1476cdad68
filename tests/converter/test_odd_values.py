"""Whatever stands in a checkpoint's JSON files: a plan or one sentence, never a traceback."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from limpet.converter.errors import ConversionError
from limpet.converter.plan import Options, make_plan
from tests.converter.checkpoints import edit_json
from tests.converter.families import build, write_folder, write_meta_folder
from tests.converter.vocabularies import write_sentencepiece_model

ODD_VALUES = (None, True, -1, 0, 2**70, 1.5, float("nan"), "", "x", [], [None], {"a": 1}, {"content": 5})
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


def test_odd_values_in_a_meta_folder_never_end_in_a_traceback(tmp_path: Path) -> None:
    write_meta_folder(tmp_path / "meta", build("meta"), write_sentencepiece_model(tmp_path / "vocabulary"), 1)
    make_plan(Options(source=tmp_path / "meta", workspace=tmp_path, name="model"))
    assert plan_all(tmp_path / "meta/params.json", tmp_path / "meta", tmp_path) > 10
