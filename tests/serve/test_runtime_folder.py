import os
import tempfile
from pathlib import Path

import pytest

from limpet.backend.serve import runtime_folder
from limpet.backend.serve.runtime_folder import RuntimeFolder


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(runtime_folder, "_SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(runtime_folder, "_MAX_BASE_BYTES", 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_folder_is_closed_to_other_users(base: Path) -> None:
    folder = RuntimeFolder()
    assert folder.path.parent == base
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()


def test_remove_takes_the_folder_and_its_shared_memory_only(base: Path) -> None:
    mine, other = RuntimeFolder(), RuntimeFolder()
    regions = [base / "shm" / f"{folder.shm_prefix}0123" for folder in (mine, other)]
    for region in regions:
        region.touch()
    mine.remove()
    assert [mine.path.exists(), other.path.exists()] == [False, True]
    assert [region.exists() for region in regions] == [False, True]
    other.remove()


def test_new_folder_sweeps_what_a_killed_server_left_and_nothing_else(base: Path) -> None:
    killed, living = RuntimeFolder(), RuntimeFolder()
    os.close(killed._lock_fd)  # as the kernel does for a killed process
    region = base / "shm" / f"{killed.shm_prefix}0123"
    region.touch()
    foreign = base / "limpet-0-not-of-limpet-serve"
    foreign.mkdir()
    fresh = RuntimeFolder()
    assert not killed.path.exists()
    assert not region.exists()
    assert living.path.exists()
    assert foreign.exists()
    living.remove()
    fresh.remove()


def test_long_temporary_folder_is_not_used_for_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = RuntimeFolder()
    assert folder.path.parent == Path("/tmp")
    folder.remove()


def test_cause_of_a_lost_front_end_is_read_once_written(base: Path) -> None:
    folder = RuntimeFolder()
    assert folder.front_end_death() is None
    (folder.path / "front-end-died").write_text("Front end m_0 was killed.\n")
    assert folder.front_end_death() == "Front end m_0 was killed."
    folder.remove()
