"""What the server says of itself while a page is used."""

from typing import Any

from limpet.client import Client
from tests.aids.live_server import LiveServer


def engine(server: LiveServer, model: str = "chain") -> dict[str, Any]:
    """The status of a model's engine: running, tokens_out, …"""
    with Client(server.target, model=model) as client:
        status: dict[str, Any] = client.status()["models"][model]
        return status


def sessions(server: LiveServer) -> list[dict[str, Any]]:
    """The chain model's sessions, oldest first."""
    with Client(server.target, model="chain") as client:
        return client.sessions()
