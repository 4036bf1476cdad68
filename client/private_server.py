"""A limpet-serve of one's own: started on free ports, stopped at the end whatever happens."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from limpet.client.client import Client
from limpet.client.errors import ConnectionLost

_READY_S = 600.0  # a large model takes minutes to load
_STOP_S = 30.0
_ASK_EVERY_S = 0.25
_PR_SET_PDEATHSIG = 1


@contextmanager
def private_server(workspace: Path, report: Callable[[str], None]) -> Iterator[str]:
    """Serves `workspace`/model_repository; yields the gRPC address once the server is ready.

    `report` is told of the progress, a sentence each. Raises ConnectionLost with the end of the server's log if it
    does not become ready.
    """
    ports = _free_ports(3)
    with tempfile.TemporaryFile(prefix="limpet-chat-") as log:
        process = subprocess.Popen(
            _command(workspace, ports),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is meant for the answer, not for the server
            preexec_fn=_end_with_parent(os.getpid()),
        )
        address = f"127.0.0.1:{ports[0]}"
        try:
            _wait_ready(process, address, report)
            yield address
        except _ServerFailed as failure:
            log.seek(0)
            tail = log.read().decode("utf-8", "replace").strip().splitlines()[-15:]
            raise ConnectionLost("\n".join([str(failure), *tail])) from None
        finally:
            _stop(process)


class _ServerFailed(Exception):
    """The server ended or did not become ready."""


def _command(workspace: Path, ports: list[int]) -> list[str]:
    names = ("grpc", "http", "metrics")
    return [
        str(Path(sys.executable).with_name("limpet-serve")),
        f"--model-repository={workspace / 'model_repository'}",
        *(f"--{name}-port={port}" for name, port in zip(names, ports, strict=True)),
        "--drain-deadline=0",
    ]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _end_with_parent(parent: int) -> Callable[[], None]:
    """For the child before it runs: ask the kernel for SIGTERM when the parent dies, even by kill -9."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _wait_ready(process: "subprocess.Popen[bytes]", address: str, report: Callable[[str], None]) -> None:
    started = time.monotonic()
    with Client(address) as client:
        while (reason := client.why_not_ready()) is not None:
            waited_s = time.monotonic() - started
            if (code := process.poll()) is not None:
                raise _ServerFailed(f"The server ended with exit code {code} before it was ready:")
            if waited_s > _READY_S:
                raise _ServerFailed(f"The server was not ready within {_READY_S:.0f} s: {reason}")
            report(f"Starting the server ... {waited_s:.0f} s")
            time.sleep(_ASK_EVERY_S)
    report(f"The server is ready after {time.monotonic() - started:.1f} s.")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its own processes end with it
        process.wait()
