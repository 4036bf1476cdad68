"""A conversion with aliases replaces all of its models or none, whenever it fails or is interrupted."""

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from limpet.converter.cli import main
from tests.aids.tiny import write_tiny

ALIASES = ("--alias", "trtllm", "--alias", "infer")
NAMES = {"ensemble", "limpet_admin", "model", "model_infer"}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """It holds a model with one of the two aliases."""
    write_tiny(tmp_path / "source")
    assert convert(tmp_path / "workspace", *ALIASES[:2]) == 0
    return tmp_path / "workspace"


def convert(workspace: Path, *options: str) -> int:
    source = workspace.parent / "source"
    return main([str(source), f"--dst={workspace}", "--name=model", *options])


def contents(workspace: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its inode: one written anew with the same bytes counts as changed."""
    files = (path for path in workspace.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_ino, path.read_bytes()) for path in files}


def fail(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupt(*_: Any) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("fault", "exit_code"), [(fail, 1), (interrupt, 130)])
def test_fault_while_an_alias_is_written_changes_nothing(
    workspace: Path, fault: Any, exit_code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(workspace)
    monkeypatch.setattr("limpet.converter.convert.write_alias", fault)
    assert convert(workspace, *ALIASES, "--force", "--dtype=float16") == exit_code
    assert "nothing was changed" in capsys.readouterr().err
    assert contents(workspace) == before


@pytest.mark.parametrize("failing", range(5))
def test_models_that_took_their_places_leave_them_when_another_cannot(
    workspace: Path, failing: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The old alias and model leave, two aliases and the new model come: five renamings."""
    before, rename, calls = contents(workspace), Path.rename, [0]

    def fail_once(path: Path, target: Path) -> Path:
        calls[0] += 1
        if calls[0] == failing + 1:
            fail()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    assert convert(workspace, *ALIASES, "--force", "--dtype=float16") == 1
    assert "nothing was changed" in capsys.readouterr().err
    assert contents(workspace) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_interruption_comes_too_late_once_models_take_their_places(
    workspace: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        signal.raise_signal(number)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    assert convert(workspace, *ALIASES, "--force", "--dtype=float16") == 0
    assert "Interrupted" not in capsys.readouterr().err
    assert {path.name for path in (workspace / "model_repository").iterdir()} == NAMES
    assert [path.name for path in workspace.iterdir()] == ["model_repository"]
    monkeypatch.undo()
    assert main(["--check", str(workspace)]) == 0


def test_conversion_under_nohup_outlives_its_terminal(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr("limpet.converter.convert.write_alias", lambda *_: signal.raise_signal(signal.SIGHUP))
        assert convert(workspace, *ALIASES, "--force") == 0
    finally:
        signal.signal(signal.SIGHUP, before)
