"""What the server says of itself while a page is used."""

import time
from typing import Any

from limpet.client import Client
from tests.aids.live_server import LiveServer

_WAIT_S = 60.0


def engine(server: LiveServer, model: str = "chain") -> dict[str, Any]:
    """The status of a model's engine: running, tokens_out, …"""
    with Client(server.target, model=model) as client:
        status: dict[str, Any] = client.status()["models"][model]
        return status


def sessions(server: LiveServer) -> list[dict[str, Any]]:
    """The chain model's sessions, oldest first."""
    with Client(server.target, model="chain") as client:
        return client.sessions()


def turn_ended_at(server: LiveServer) -> float:
    """Wait until the chain model's latest session is idle; returns since when it is, in seconds since 1970.

    The server says so itself: however late a busy machine lets the test ask, the answer is the same.
    """
    deadline = time.monotonic() + _WAIT_S
    while True:
        asked_at = time.time()
        latest = sessions(server)[-1]
        if not latest["running"]:
            return asked_at - float(latest["idle_s"])
        assert time.monotonic() < deadline
