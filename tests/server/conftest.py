"""Real servers for end-to-end tests: tritonserver, front end, engine, started by limpet-serve on free ports."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.aids.live_server import LiveServer, live_server


def _served(repository: Path) -> Iterator[LiveServer]:
    """A server for many tests; whatever they did, it must stop cleanly and leave nothing."""
    with live_server(repository, ["--drain-deadline=5"]) as server:
        server.wait_ready()
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="session")
def smollm2(smollm2_repository: Path) -> Iterator[LiveServer]:
    """SmolLM2 as the model `smollm2`."""
    yield from _served(smollm2_repository)


@pytest.fixture(scope="session")
def chain(chain_repository: Path) -> Iterator[LiveServer]:
    """The chain checkpoint as the model `chain`."""
    yield from _served(chain_repository)


@pytest.fixture(scope="session")
def tiny() -> Iterator[LiveServer]:
    """A random model as `tiny`, whose cache holds a few sessions only."""
    from tests.aids.repositories import tiny_repository

    yield from _served(tiny_repository())


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
