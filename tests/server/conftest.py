"""Repositories and servers for end-to-end tests, beside those of tests/conftest.py."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.aids.live_server import LiveServer, shared_server


@pytest.fixture(scope="session")
def tiny() -> Iterator[LiveServer]:
    """A random model as `tiny`, whose cache holds a few sessions only."""
    from tests.aids.repositories import tiny_repository

    yield from shared_server(tiny_repository())


@pytest.fixture(scope="session")
def edited_chain(chain_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Makes a repository with the chain of which config.pbtxt has one text replaced by another."""

    def edit(old: str, new: str) -> Path:
        copy = tmp_path_factory.mktemp("edited") / "repository"
        shutil.copytree(chain_repository, copy)
        config = copy / "chain" / "config.pbtxt"
        text = config.read_text("utf-8")
        assert text.count(old) == 1, text
        config.write_text(text.replace(old, new), "utf-8")
        return copy

    return edit
