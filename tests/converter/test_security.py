"""A checkpoint is data: nothing in it runs, nothing outside its folder is read."""

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from limpet.converter.cli import main
from tests.converter.checkpoints import edit_json, run_convert, write_gguf
from tests.converter.families import build, write_bin_folder, write_folder, write_meta_folder
from tests.converter.vocabularies import write_sentencepiece_model


class _TouchesOnLoad:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def _refused(source: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([str(source), "--dst", str(source.parent / "workspace")]) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize("zipped", [True, False])
def test_objects_in_a_bin_file_are_not_unpickled(
    tmp_path: Path, zipped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bin_folder(tmp_path / "source", build("llama-2"))
    path, trace = tmp_path / "source/pytorch_model.bin", tmp_path / "trace"
    tensors = torch.load(path, weights_only=True)
    torch.save(tensors | {"extra": _TouchesOnLoad(trace)}, path, _use_new_zipfile_serialization=zipped)
    assert "holds more than tensors" in _refused(tmp_path / "source", capsys)
    assert not trace.exists()


def test_objects_in_a_meta_part_are_not_unpickled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = write_sentencepiece_model(tmp_path / "tokenizer.model")
    write_meta_folder(tmp_path / "source", build("meta"), tokenizer, 1)
    (tmp_path / "source/consolidated.00.pth").write_bytes(pickle.dumps(_TouchesOnLoad(tmp_path / "trace"), protocol=2))
    _refused(tmp_path / "source", capsys)
    assert not (tmp_path / "trace").exists()


def test_code_that_comes_with_the_checkpoint_is_not_run(tmp_path: Path) -> None:
    write_folder(tmp_path / "source", build("llama-2"))
    code = f"from pathlib import Path\nPath({str(tmp_path / 'trace')!r}).touch()\n"
    for name in ("modeling_evil", "tokenization_evil", "configuration_evil"):
        (tmp_path / "source" / f"{name}.py").write_text(code)
    classes = {"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "modeling_evil.M"}
    edit_json(tmp_path / "source/config.json", auto_map=classes)
    tokenizer = {"AutoTokenizer": ["tokenization_evil.T", "tokenization_evil.T"]}
    edit_json(tmp_path / "source/tokenizer_config.json", auto_map=tokenizer, tokenizer_class="EvilTokenizer")
    run_convert(tmp_path / "source", tmp_path)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("name", ["../outside.bin", "/etc/hostname", "sub/part.bin", "..", "", 7, None])
def test_index_leads_nowhere_but_to_files_of_the_folder(
    tmp_path: Path, name: object, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "source", build("llama-2"))
    (tmp_path / "outside.bin").write_bytes(b"")
    index = tmp_path / "source/model.safetensors.index.json"
    index.write_text("{}")
    edit_json(index, weight_map={"model.norm.weight": name})
    error = _refused(tmp_path / "source", capsys)
    assert "only files of the folder itself" in error or "is missing" in error


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        *("model.safetensors", "model.safetensors.index.json"),
    ],
)
def test_links_out_of_a_hugging_face_folder_are_not_followed(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path / "source", build("llama-2"))
    _move_away(tmp_path / "source" / name, tmp_path / "outside")
    assert f"{name} is a link that leads out of the folder source" in _refused(tmp_path / "source", capsys)


@pytest.mark.parametrize("name", ["7B", "7B/consolidated.00.pth", "7B/params.json", "tokenizer.model"])
def test_links_out_of_a_meta_folder_are_not_followed(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = write_sentencepiece_model(tmp_path / "vocabulary")
    write_meta_folder(tmp_path / "source/7B", build("meta"), tokenizer, 1)
    (tmp_path / "source/7B/tokenizer.model").rename(tmp_path / "source/tokenizer.model")
    _move_away(tmp_path / "source" / name, tmp_path / "outside")
    assert f"{Path(name).name} is a link that leads out of the folder" in _refused(tmp_path / "source", capsys)


def test_links_out_of_the_folder_of_a_split_gguf_are_not_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "source").mkdir()
    write_gguf(tmp_path / "source/parts.gguf", build("meta"), split_max_tensors=12)
    _move_away(tmp_path / "source/parts-00002-of-00002.gguf", tmp_path / "outside")
    assert "is a link that leads out of" in _refused(tmp_path / "source/parts-00001-of-00002.gguf", capsys)


@pytest.mark.parametrize("target", ["weights.safetensors", "model.safetensors"], ids=["inside", "circle"])
def test_links_within_the_folder_are_followed(tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "source", build("llama-2"))
    path = tmp_path / "source/model.safetensors"
    path.rename(path.with_name("weights.safetensors"))
    path.symlink_to(target)
    if target == path.name:
        assert "No model.safetensors" in _refused(tmp_path / "source", capsys)
    else:
        run_convert(tmp_path / "source", tmp_path)


def _move_away(path: Path, outside: Path) -> None:
    """Leave a link in its place; to nothing, where nothing was."""
    if path.exists():
        path.rename(outside)
    path.symlink_to(outside)


@pytest.mark.parametrize("part", ["consolidated.01.pth", "consolidated.00.pth", "tokenizer.model", "params.json"])
def test_meta_folder_without_a_part_is_refused(tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = write_sentencepiece_model(tmp_path / "vocabulary")
    write_meta_folder(tmp_path / "source", build("meta"), tokenizer, 3 if part == "consolidated.01.pth" else 1)
    (tmp_path / "source" / part).unlink()
    assert part in _refused(tmp_path / "source", capsys)


@pytest.mark.parametrize(("num_parts", "found"), [(1, 2), (3, 2), (3, 4)], ids=["stray", "cut off", "one too many"])
def test_meta_folder_with_another_number_of_parts_is_refused(
    tmp_path: Path, num_parts: int, found: int, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = write_sentencepiece_model(tmp_path / "vocabulary")
    write_meta_folder(tmp_path / "source", build("meta"), tokenizer, num_parts)
    first, last = (tmp_path / f"source/consolidated.{number:02}.pth" for number in (0, max(num_parts, found) - 1))
    last.write_bytes(first.read_bytes()) if found > num_parts else last.unlink()
    error = _refused(tmp_path / "source", capsys)
    assert f"There are {found} parts" in error
    assert "a part is missing or belongs to another model" in error


@pytest.mark.parametrize("size", [0, 10, 5000])
def test_cut_bin_file_is_refused(tmp_path: Path, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    write_bin_folder(tmp_path / "source", build("llama-2"))
    with (tmp_path / "source/pytorch_model.bin").open("r+b") as file:
        file.truncate(size)
    assert "pytorch_model.bin" in _refused(tmp_path / "source", capsys)


def test_damaged_pickle_of_a_bin_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bin_folder(tmp_path / "source", build("llama-2"), zipped=False)
    path = tmp_path / "source/pytorch_model.bin"
    storage = re.compile(rb"\d{10,}")
    path.write_bytes(
        storage.sub(lambda found: b"0" * len(found[0]), path.read_bytes(), count=1)
    )  # one that is not there
    assert "pytorch_model.bin cannot be read" in _refused(tmp_path / "source", capsys)


def test_zip_archive_that_claims_several_disks_is_torchs_to_judge(tmp_path: Path) -> None:
    write_bin_folder(tmp_path / "source", build("llama-2"))
    path = tmp_path / "source/pytorch_model.bin"
    path.write_bytes(path.read_bytes().replace(b"PK\x06\x07\0", b"PK\x06\x07\1"))
    with pytest.raises(zipfile.BadZipFile):
        zipfile.is_zipfile(path)
    run_convert(tmp_path / "source", tmp_path)


ODD_TABLES: dict[str, tuple[Any, str]] = {
    "nothing": ({}, "holds no tensors"),
    "one table in another": ({"model": {"lm_head.weight": torch.ones(2)}}, "holds no tensors"),
    "numbered": ({1: torch.ones(2), (2, 3): torch.ones(2)}, "has the tensors 1, (2, 3), which"),
    "sparse": ({"lm_head.weight": torch.eye(3).to_sparse()}, "lm_head.weight in pytorch_model.bin is no plain matrix"),
    "without values": ({"lm_head.weight": torch.ones(2, device="meta")}, "is no plain matrix"),
    "a list": ([torch.ones(2)], "holds no table of tensors"),
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ODD_TABLES)
def test_bin_file_of_something_else_is_refused(
    tmp_path: Path, name: str, zipped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bin_folder(tmp_path / "source", build("llama-2"))
    content, sentence = ODD_TABLES[name]
    torch.save(content, tmp_path / "source/pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert sentence in _refused(tmp_path / "source", capsys)


def test_folder_with_several_meta_models_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = write_sentencepiece_model(tmp_path / "vocabulary")
    for name in ("7B", "13B"):
        write_meta_folder(tmp_path / "source" / name, build("meta"), tokenizer, 1)
    assert "several models (13B, 7B)" in _refused(tmp_path / "source", capsys)
