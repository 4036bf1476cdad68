from collections.abc import Iterator

import pytest

from limpet.client import Client
from tests.client.fake_server import FakeServer, fake_server


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(server.target) as client:
        yield client
