from collections.abc import Iterator

import openai
import pytest

from tests.api.endpoint import endpoint
from tests.client.fake_server import FakeServer, fake_server


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[FakeServer, str]]:
    with fake_server() as server, endpoint(server.target) as url:
        yield server, url


@pytest.fixture
def server(shared: tuple[FakeServer, str]) -> Iterator[FakeServer]:
    """As a test finds it: answers Hello world, nothing asked yet."""
    server = shared[0]
    before = dict(vars(server))
    server.asked.clear()
    server.operations.clear()
    yield server
    vars(server).update(before)


@pytest.fixture
def url(shared: tuple[FakeServer, str], server: FakeServer) -> str:
    return shared[1]


@pytest.fixture
def ask(url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client
