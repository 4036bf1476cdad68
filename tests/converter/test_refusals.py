"""Bad sources and targets: one sentence, exit code 1, and nothing left behind."""

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from limpet.converter.cli import main
from limpet.converter.safetensors_file import SafetensorsWriter
from tests.aids.tiny import write_tiny
from tests.converter.checkpoints import edit_json, edit_weights, run_convert, write_gguf
from tests.converter.families import build, write_bin_folder, write_meta_folder
from tests.converter.vocabularies import write_sentencepiece_model

Damage = Callable[[Path], object]


def _first_shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[0]


def _cut_shard(folder: Path) -> None:
    os.truncate(_first_shard(folder), _first_shard(folder).stat().st_size - 1)


def _index_elsewhere(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


SHARDED_FAULTS: dict[str, tuple[Damage, str]] = {
    "missing shard": (lambda folder: _first_shard(folder).unlink(), "is missing"),
    "cut shard": (_cut_shard, "cut short"),
    "empty shard": (lambda folder: _first_shard(folder).write_bytes(b""), "cut short"),
    "shard of text": (lambda folder: _first_shard(folder).write_text("<html>404</html>" * 9), "no safetensors file"),
    "index outside the folder": (_index_elsewhere, "only files of the folder itself"),
    "index without map": (
        lambda folder: edit_json(folder / "model.safetensors.index.json", weight_map=None),
        "no weight_map",
    ),
}
SINGLE_FAULTS: dict[str, tuple[Damage, str]] = {
    "wrong shape": (
        lambda folder: edit_weights(folder, lambda t: t.update({"model.norm.weight": torch.ones(47)})),
        "model.norm.weight has shape [47], the configuration implies [48]",
    ),
    "missing tensor": (
        lambda folder: edit_weights(folder, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight")),
        "lacks the tensor model.layers.1.self_attn.k_proj.weight",
    ),
    "no head": (
        lambda folder: edit_weights(folder, lambda t: t.pop("lm_head.weight")),
        "lacks the tensor lm_head.weight",
    ),
    "left-over tensor": (
        lambda folder: edit_weights(
            folder, lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(80, 48)})
        ),
        "has the tensor model.layers.2.mlp.up_proj.weight, which",
    ),
    "other names": (
        lambda folder: edit_weights(folder, lambda t: [t.update({f"language.{n}": t.pop(n)}) for n in list(t)]),
        "language.lm_head.weight",
    ),
    "integers": (
        lambda folder: edit_weights(
            folder, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)})
        ),
        "model.norm.weight has type int8: quantised",
    ),
    "NaN": (
        lambda folder: edit_weights(folder, lambda t: t["model.norm.weight"].fill_(float("nan"))),
        "model.norm.weight holds NaN",
    ),
    "unknown architecture": (
        lambda folder: edit_json(folder / "config.json", architectures=["BertModel"]),
        "Architecture BertModel is not supported",
    ),
    "no architecture": (lambda folder: edit_json(folder / "config.json", architectures=None), "Architecture none"),
    "quantised": (
        lambda folder: edit_json(folder / "config.json", quantization_config={"quant_method": "gptq"}),
        "quantised (gptq)",
    ),
    "activation": (lambda folder: edit_json(folder / "config.json", hidden_act="gelu"), "hidden_act is 'gelu'"),
    "no hidden size": (
        lambda folder: edit_json(folder / "config.json", hidden_size=None),
        "missing required field `hidden_size`",
    ),
    "text for a number": (
        lambda folder: edit_json(folder / "config.json", vocab_size="big"),
        "Expected `int`, got `str` - at `$.vocab_size`",
    ),
    "too many layers": (
        lambda folder: edit_json(folder / "config.json", num_hidden_layers=10**9),
        "has 1000000000 layers",
    ),
    "unknown rope": (
        lambda folder: edit_json(
            folder / "config.json", rope_parameters=None, rope_scaling={"type": "su", "factor": 2}
        ),
        "Rope scaling 'su' is not supported",
    ),
    "vocabulary too small": (
        lambda folder: edit_json(folder / "config.json", vocab_size=200),
        "embed_tokens.weight has shape [300, 48], the configuration implies [200, 48]",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer"),
    "broken tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json cannot be read"),
    "broken configuration": (lambda folder: (folder / "config.json").write_text("{"), "config.json is no valid JSON"),
    "broken template": (
        lambda folder: (folder / "chat_template.jinja").write_text("{% if %}"),
        "chat template fails on a plain conversation",
    ),
    "template in another encoding": (
        lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff\xfe"),
        "chat_template.jinja is no UTF-8 text",
    ),
    "template that escapes": (
        lambda folder: (folder / "chat_template.jinja").write_text(
            "{{ messages.__class__.__mro__[1].__subclasses__() }}"
        ),
        "chat template fails on a plain conversation",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "No model.safetensors"),
}


def _refused(source: Path, workspace: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The sentence of a conversion that fails; nothing may be left of the workspace."""
    assert main([str(source), "--dst", str(workspace), "--name", "model", *options]) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert not workspace.exists()
    return error


@pytest.mark.parametrize("fault", SINGLE_FAULTS)
def test_damaged_folder_is_refused_in_one_sentence(
    tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(tmp_path / "source")
    damage, sentence = SINGLE_FAULTS[fault]
    damage(tmp_path / "source")
    assert sentence in _refused(tmp_path / "source", tmp_path / "workspace", capsys)


@pytest.mark.parametrize("fault", SHARDED_FAULTS)
def test_damaged_shards_are_refused_in_one_sentence(
    tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(tmp_path / "source", max_shard_size="20KB")
    damage, sentence = SHARDED_FAULTS[fault]
    damage(tmp_path / "source")
    assert sentence in _refused(tmp_path / "source", tmp_path / "workspace", capsys)


def test_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(tmp_path / "source")

    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][:200].clone()

    edit_weights(tmp_path / "source", shrink)
    edit_json(tmp_path / "source/config.json", vocab_size=200)
    assert "vocabulary has 200 entries" in _refused(tmp_path / "source", tmp_path / "workspace", capsys)


def test_values_that_float16_cannot_hold_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(tmp_path / "source")
    edit_weights(tmp_path / "source", lambda t: t["model.norm.weight"].fill_(1e6))
    sentence = _refused(tmp_path / "source", tmp_path / "workspace", capsys, "--dtype", "float16")
    assert "model.norm.weight has values up to 1e+06, too large for float16" in sentence
    run_convert(tmp_path / "source", tmp_path / "workspace", "--dtype", "bfloat16")


SOURCES: dict[str, tuple[Callable[[Path, PreTrainedModel], object], str]] = {
    "bin": (write_bin_folder, "model.norm.weight"),
    "gguf": (lambda path, model: write_gguf(path, model), "output_norm.weight"),
    "meta": (
        lambda path, model: write_meta_folder(path, model, write_sentencepiece_model(path.parent / "vocabulary"), 1),
        "norm.weight",
    ),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_values_that_no_model_can_use_are_refused_from_every_source(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write, name = SOURCES[kind]
    model = build("meta")
    for value, options, sentence in (
        (float("nan"), [], "holds NaN"),
        (1e6, ["--dtype", "float16"], "has values up to 1e+06, too large for float16"),
    ):
        model.model.norm.weight.data.fill_(value)
        source = tmp_path / f"{value}.gguf"
        write(source, model)
        assert f"Tensor {name} {sentence}" in _refused(source, tmp_path / "workspace", capsys, *options)


@pytest.mark.parametrize("name", ["nothing.gguf", "nothing"])
def test_source_that_does_not_exist_is_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist" in _refused(tmp_path / name, tmp_path / "workspace", capsys)


@pytest.mark.parametrize("name", ["limpet_admin", "..", "///"])
def test_name_that_no_model_can_have_is_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(tmp_path / "source")
    assert main([str(tmp_path / "source"), "--dst", str(tmp_path / "workspace"), "--name", name]) == 1
    assert "cannot name a model" in capsys.readouterr().err


def test_existing_target_is_kept_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(tmp_path / "source")
    checkpoint = run_convert(tmp_path / "source", tmp_path / "workspace")
    before = checkpoint.manifest()
    assert main([str(tmp_path / "source"), "--dst", str(tmp_path / "workspace"), "--name", "model"]) == 1
    assert "--force" in capsys.readouterr().err
    assert checkpoint.manifest() == before
    run_convert(tmp_path / "source", tmp_path / "workspace", "--force", "--dtype", "float16")
    assert checkpoint.model_config().dtype == "float16"
    assert sorted(path.name for path in (tmp_path / "workspace").iterdir()) == ["model_repository"]


def test_failure_under_force_leaves_the_old_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(tmp_path / "source")
    checkpoint = run_convert(tmp_path / "source", tmp_path / "workspace")
    before = checkpoint.manifest()
    edit_weights(tmp_path / "source", lambda t: t["model.norm.weight"].fill_(float("nan")))
    assert main([str(tmp_path / "source"), "--dst", str(tmp_path / "workspace"), "--name", "model", "--force"]) == 1
    assert checkpoint.manifest() == before
    assert checkpoint.weight_files()
    assert sorted(path.name for path in (tmp_path / "workspace").iterdir()) == ["model_repository"]


def test_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(tmp_path / "source")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SafetensorsWriter, "write", full)
    assert "disk is full" in _refused(tmp_path / "source", tmp_path / "workspace", capsys)


def test_file_size_limit_ends_in_a_sentence_too(tmp_path: Path) -> None:
    write_tiny(tmp_path / "source")
    result = subprocess.run(
        [sys.executable, "-c", _RUN_MAIN, str(tmp_path / "source"), "--dst", str(tmp_path / "workspace")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    assert "disk is full" in result.stderr
    assert not (tmp_path / "workspace").exists()


def test_disk_too_small_is_noticed_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(tmp_path / "source")
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr("limpet.converter.convert.shutil.disk_usage", lambda _: usage)
    refusal = _refused(tmp_path / "source", tmp_path / "workspace", capsys)
    assert re.search(r" has 1\.0 kB free, the weights need \d+\.\d kB\.", refusal)


@pytest.mark.parametrize("name", ["a/b", "a b", "é", ".hidden", "", "limpet_admin"])
@pytest.mark.parametrize("option", ["--name", "--alias=trtllm="])
def test_name_that_cannot_be_used_as_it_is_is_refused_and_not_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, name: str
) -> None:
    write_tiny(tmp_path / "source")
    arguments = [option, name] if option == "--name" else [option + (name or "-")]
    assert "cannot name a model" in _refused(tmp_path / "source", tmp_path / "workspace", capsys, *arguments)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_in_the_middle_leaves_nothing(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(tmp_path / "source")
    written: list[str] = []
    write = SafetensorsWriter.write

    def interrupted(self: SafetensorsWriter, name: str, parts: Iterable[torch.Tensor]) -> None:
        write(self, name, parts)
        written.append(name)
        if len(written) == 3:
            signal.raise_signal(number)

    monkeypatch.setattr(SafetensorsWriter, "write", interrupted)
    assert main([str(tmp_path / "source"), "--dst", str(tmp_path / "workspace"), "--name", "model"]) == 130
    assert len(written) == 3
    assert not (tmp_path / "workspace").exists()
    assert "Interrupted" in capsys.readouterr().err


def test_target_that_is_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(tmp_path / "source")
    (tmp_path / "workspace").write_text("in the way")
    assert main([str(tmp_path / "source"), "--dst", str(tmp_path / "workspace")]) == 1
    assert "Not a directory" in capsys.readouterr().err


def test_target_that_may_not_be_written_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        place.chmod(0o755)
        write_tiny(place / "source")
        for path in (place / "source").iterdir():
            path.chmod(0o644)
        (place / "workspace").mkdir(mode=0o555)
        command = [sys.executable, "-c", _CONVERT_AS_NOBODY, place / "source", place / "first", place / "workspace"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == 1
        assert (
            result.stderr.splitlines()[-1] == f"limpet-convert: {place}/workspace/model_repository: Permission denied."
        )
        assert list((place / "workspace").iterdir()) == []


def test_wrong_usage_has_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--dtype", "int3", "x"])
    assert stop.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


# The first conversion imports all that the second one needs: nobody might not be allowed to read it.
_CONVERT_AS_NOBODY = """
import os, sys
from limpet.converter.cli import main
source, allowed, forbidden = sys.argv[1:]
main([source, "--dst", allowed])
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
sys.exit(main([source, "--dst", forbidden]))
"""
_RUN_MAIN = "import sys; from limpet.converter.cli import main; sys.exit(main())"
