"""tokenize and detokenize: what both clients ask of limpet_admin, and what they make of its answer."""

from typing import Any

import pytest

from limpet.client import AsyncClient, Client
from tests.client.fake_server import MODEL, FakeServer

MESSAGES = [{"role": "user", "content": "Hi"}]
ASKED = [
    {"op": "tokenize", "model": MODEL, "text": "Größe"},
    {"op": "tokenize", "model": MODEL, "messages": MESSAGES},
    {"op": "detokenize", "model": MODEL, "ids": [4, 5]},
]


@pytest.fixture(autouse=True)
def answers(server: FakeServer) -> None:
    def answer(operation: dict[str, Any]) -> dict[str, Any]:
        return {"ids": [4, 5], "num_tokens": 2} if operation["op"] == "tokenize" else {"text": "Größe"}

    server.admin = answer


def test_blocking(server: FakeServer, client: Client) -> None:
    assert client.tokenize("Größe") == client.tokenize(messages=MESSAGES) == [4, 5]
    assert client.detokenize((4, 5)) == "Größe"
    assert server.operations == ASKED


async def test_asyncio(server: FakeServer) -> None:
    async with AsyncClient(server.target) as client:
        assert await client.tokenize("Größe") == await client.tokenize(messages=MESSAGES) == [4, 5]
        assert await client.detokenize((4, 5)) == "Größe"
    assert server.operations == ASKED
