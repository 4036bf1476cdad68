"""What a conversion leaves on disk and tells the user."""

import hashlib
from pathlib import Path

import pytest
from safetensors import safe_open

from limpet.backend.config import EngineConfig, parse_parameters
from limpet.converter.cli import main
from limpet.converter.engine_settings import DESCRIPTIONS
from tests.aids.tiny import write_tiny
from tests.converter.checkpoints import run_convert
from tests.converter.pbtxt import read_parameters


def test_manifest_holds_size_and_checksum_of_every_other_file(tmp_path: Path) -> None:
    write_tiny(tmp_path / "source")
    checkpoint = run_convert(tmp_path / "source", tmp_path)
    files = {path.name: path for path in checkpoint.folder.iterdir() if path != checkpoint.manifest_path}
    entries = checkpoint.manifest().files
    assert entries.keys() == files.keys()
    for name, path in files.items():
        assert entries[name].num_bytes == path.stat().st_size
        assert entries[name].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_manifest_names_no_absolute_path(tmp_path: Path) -> None:
    write_tiny(tmp_path / "source")
    assert "/" not in run_convert(tmp_path / "source", tmp_path).manifest().source


def test_large_models_are_cut_into_files_that_the_library_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("limpet.converter.weights.SHARD_BYTES", 60_000)
    model = write_tiny(tmp_path / "source")
    checkpoint = run_convert(tmp_path / "source", tmp_path)
    files = checkpoint.weight_files()
    assert len(files) > 2
    names = []
    for path in files:
        with safe_open(path, framework="pt") as file:
            names += list(file.keys())
    assert len(names) == len(set(names))
    assert sum(1 for name in names if name.endswith("qkv_proj.weight")) == model.config.num_hidden_layers


def test_configuration_holds_every_setting_at_its_default(tmp_path: Path) -> None:
    write_tiny(tmp_path / "source")
    text = (run_convert(tmp_path / "source", tmp_path).root / "config.pbtxt").read_text()
    parameters = read_parameters(text)
    assert parameters.keys() == set(EngineConfig.__struct_fields__) == DESCRIPTIONS.keys()
    assert parse_parameters(parameters) == EngineConfig()
    assert 'name: "model"' in text
    assert "{{" not in text


def test_repository_gets_the_administration_model_once(tmp_path: Path) -> None:
    write_tiny(tmp_path / "source")
    checkpoint = run_convert(tmp_path / "source", tmp_path)
    admin = checkpoint.root.parent / "limpet_admin"
    assert (admin / "config.pbtxt").is_file()
    assert (admin / "1" / "model.py").is_file()
    (admin / "config.pbtxt").write_text("mine")
    run_convert(tmp_path / "source", tmp_path, "--force")
    assert (admin / "config.pbtxt").read_text() == "mine"


def test_summary_gives_the_commands_to_go_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(tmp_path / "source")
    run_convert(tmp_path / "source", tmp_path / "workspace")
    output = capsys.readouterr()
    assert f"limpet-serve --model-repository={tmp_path}/workspace/model_repository --grpc-port=33337\n" in output.out
    assert "limpet-chat 127.0.0.1:33337\n" in output.out
    assert f"limpet-chat {tmp_path}/workspace\n" in output.out
    assert "LlamaForCausalLM" in output.err


def test_summary_names_the_model_where_the_workspace_has_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(tmp_path / "source")
    for name in ("first", "second"):
        assert main([str(tmp_path / "source"), f"--dst={tmp_path}", f"--name={name}"]) == 0
    output = capsys.readouterr().out
    assert "limpet-chat 127.0.0.1:33337 --model second\n" in output
    assert "--model first" not in output


def test_help_shows_an_example_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "limpet-convert SmolLM2-135M-Instruct.Q4_1.gguf" in text
    assert "exit codes" in text
    assert [
        name for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "InternLM2", "DeepSeek-V2") if name not in text
    ] == []
