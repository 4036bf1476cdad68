"""One engine for each server and model, known by a lock that only it holds."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from limpet.backend.link.ownership import (
    EngineRuntime,
    EngineState,
    OwnershipError,
    process_start_ticks,
    runtime_root,
    settings_digest,
    sweep_dead_engines,
)

_TAKE_AND_WAIT = """
import sys
from pathlib import Path
from limpet.backend.link.ownership import EngineRuntime
print(EngineRuntime(Path(sys.argv[1])).take_lock("theirs"), flush=True)
sys.stdin.read()
"""


@contextmanager
def other_engine(runtime: EngineRuntime) -> Iterator["subprocess.Popen[str]"]:
    """Another process that tries to become the engine, and stays until the end."""
    command = [sys.executable, "-c", _TAKE_AND_WAIT, str(runtime.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def took_lock(process: "subprocess.Popen[str]") -> bool:
    assert process.stdout is not None
    return process.stdout.readline().strip() == "True"


def dead_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_the_lock_is_held_by_one_process_and_ends_with_it(runtime: EngineRuntime) -> None:
    with other_engine(runtime) as process:
        assert took_lock(process)
        assert runtime.is_locked()
        assert runtime.state() == EngineState(process.pid, "theirs")
        assert not EngineRuntime(runtime.folder).take_lock("mine")
        process.kill()
        process.wait()
    assert not runtime.is_locked()
    assert runtime.state() is None
    assert runtime.take_lock("mine")
    assert runtime.state() == EngineState(os.getpid(), "mine")


def test_a_lock_in_a_removed_folder_guards_nothing(runtime: EngineRuntime) -> None:
    with other_engine(runtime) as process:
        assert took_lock(process)
        runtime.remove()
        assert EngineRuntime(runtime.folder).take_lock("mine")


def test_the_folder_is_closed_to_other_users(runtime: EngineRuntime) -> None:
    for folder in (runtime.folder, runtime_root()):
        assert folder.stat().st_mode & 0o777 == 0o700
    runtime.folder.chmod(0o755)
    with pytest.raises(OwnershipError, match="closed to others"):
        runtime.prepare()


def test_a_socket_path_that_the_kernel_cannot_take_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMPET_RUNTIME_DIR", str(tmp_path / ("x" * 90)))
    with pytest.raises(OwnershipError, match="LIMPET_RUNTIME_DIR"):
        EngineRuntime.for_model(tmp_path, os.getpid()).prepare()


def test_engines_are_told_apart_by_server_and_real_path(runtime: EngineRuntime, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert EngineRuntime.for_model(tmp_path / "link", os.getpid()).folder == runtime.folder
    assert EngineRuntime.for_model(tmp_path / "other", os.getpid()).folder != runtime.folder
    assert EngineRuntime.for_model(tmp_path, os.getppid()).folder != runtime.folder
    with pytest.raises(OwnershipError, match="no tritonserver"):
        EngineRuntime.for_model(tmp_path, dead_process())


def test_only_folders_of_dead_servers_without_an_engine_are_swept(runtime: EngineRuntime) -> None:
    root = runtime_root()
    pid = dead_process()
    dead, kept = EngineRuntime(root / f"{pid}-1-a"), EngineRuntime(root / f"{pid}-1-b")
    dead.prepare()
    reused = EngineRuntime(root / f"{os.getpid()}-{(process_start_ticks(os.getpid()) or 0) + 1}-c")
    reused.prepare()
    with other_engine(kept) as process:
        assert took_lock(process)
        sweep_dead_engines(root)
    assert [folder.exists() for folder in (dead.folder, reused.folder, kept.folder, runtime.folder)] == [
        False,
        False,
        True,
        True,
    ]


def test_settings_are_the_same_in_any_order() -> None:
    assert settings_digest({"a": "1", "b": "2"}) == settings_digest({"b": "2", "a": "1"})
    assert settings_digest({"a": "1"}) != settings_digest({"a": "2"})
