"""Fixtures for all tests: the real model and the chain checkpoint, converted and served.

The converter is imported by the fixtures that need it: it brings torch, which most tests do without.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.aids.live_server import LiveServer, shared_server

# Triton decides between compiling and interpreting when it is imported, which transformers may do in any test.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def smollm2_repository() -> Path:
    """A model repository with `smollm2` and `limpet_admin`; not to be written to."""
    from tests.aids.repositories import smollm2_repository

    try:
        return smollm2_repository()
    except FileNotFoundError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def smollm2_dir(smollm2_repository: Path) -> Path:
    """The model's folder inside its repository."""
    return smollm2_repository / "smollm2"


@pytest.fixture(scope="session")
def chain_repository() -> Path:
    """A model repository with `chain` and `limpet_admin`; not to be written to."""
    from tests.aids.repositories import chain_repository

    return chain_repository()


@pytest.fixture(scope="session")
def chain_dir(chain_repository: Path) -> Path:
    """The chain model's folder inside its repository."""
    return chain_repository / "chain"


@pytest.fixture(scope="session")
def smollm2(smollm2_repository: Path) -> Iterator[LiveServer]:
    """SmolLM2 as the model `smollm2`, served by tritonserver."""
    yield from shared_server(smollm2_repository)


@pytest.fixture(scope="session")
def chain(chain_repository: Path) -> Iterator[LiveServer]:
    """The chain checkpoint as the model `chain`, served by tritonserver."""
    yield from shared_server(chain_repository)
