"""A checkpoint is data: nothing in it runs, nothing outside its folder is read."""

import pickle
from pathlib import Path

import pytest
import torch

from limpet.converter.cli import main
from tests.converter.checkpoints import edit_json, run_convert
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


@pytest.mark.parametrize("part", ["consolidated.01.pth", "consolidated.00.pth", "tokenizer.model", "params.json"])
def test_meta_folder_without_a_part_is_refused(tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = write_sentencepiece_model(tmp_path / "vocabulary")
    write_meta_folder(tmp_path / "source", build("meta"), tokenizer, 3 if part == "consolidated.01.pth" else 1)
    (tmp_path / "source" / part).unlink()
    assert part in _refused(tmp_path / "source", capsys)


@pytest.mark.parametrize("size", [0, 10, 5000])
def test_cut_bin_file_is_refused(tmp_path: Path, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    write_bin_folder(tmp_path / "source", build("llama-2"))
    with (tmp_path / "source/pytorch_model.bin").open("r+b") as file:
        file.truncate(size)
    assert "pytorch_model.bin" in _refused(tmp_path / "source", capsys)


def test_folder_with_several_meta_models_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = write_sentencepiece_model(tmp_path / "vocabulary")
    for name in ("7B", "13B"):
        write_meta_folder(tmp_path / "source" / name, build("meta"), tokenizer, 1)
    assert "several models (13B, 7B)" in _refused(tmp_path / "source", capsys)
