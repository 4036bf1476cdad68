"""The endpoint on a port of its own, served from a thread of the test."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn

from limpet.client.api.app import create_app
from tests.aids.live_server import free_ports


@contextmanager
def endpoint(address: str, keys: Sequence[str] = ()) -> Iterator[str]:
    """Its URL; it stands in front of the server at `address`."""
    [port] = free_ports(1)
    server = uvicorn.Server(uvicorn.Config(create_app(address, keys), port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    listening = threading.Event()
    startup = server.startup

    async def start(*arguments: object, **keywords: object) -> None:
        await startup(*arguments, **keywords)  # type: ignore[arg-type]
        listening.set()

    server.startup = start  # type: ignore[method-assign]
    thread.start()
    try:
        assert listening.wait(30)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
