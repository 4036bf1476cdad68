"""The commands of this repository as children: how long they take and how much memory they touch."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from limpet.client import Client

START_S = 600.0
STOP_S = 60.0


@dataclass(frozen=True)
class Finished:
    """What a command cost."""

    wall_s: float
    peak_bytes: int


def run_command(name: str, *arguments: str) -> Finished:
    """Run a console script of this environment to its end; raises RuntimeError if it fails."""
    started = time.monotonic()
    process = subprocess.Popen([_script(name), *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{name} ended with exit code {process.returncode}.")
    return Finished(time.monotonic() - started, usage.ru_maxrss * 1024)


@dataclass(frozen=True)
class Server:
    """A running limpet-serve."""

    process: psutil.Popen
    address: str
    start_s: float

    def peak_bytes(self, only: str = "") -> int:
        """Sum over its processes (those whose command line contains `only`) of the most memory each has touched."""
        family = [self.process, *self.process.children(recursive=True)]
        return sum(_peak_bytes(member.pid) for member in family if only in " ".join(member.cmdline()))


@contextmanager
def serve(repository: Path, ports: tuple[int, int, int], threads: int) -> Iterator[Server]:
    """limpet-serve on the repository with gRPC, HTTP and metrics on `ports`, ready; stopped at the end."""
    flags = [f"--{name}-port={port}" for name, port in zip(("grpc", "http", "metrics"), ports, strict=True)]
    address = f"127.0.0.1:{ports[0]}"
    started = time.monotonic()
    process = psutil.Popen(
        [_script("limpet-serve"), f"--model-repository={repository}", *flags],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_ready(process, address)
        yield Server(process, address, time.monotonic() - started)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)


@contextmanager
def endpoint(server: str) -> Iterator[str]:
    """limpet-api in front of the server at that gRPC address; its URL."""
    port = free_ports()[0]
    process = subprocess.Popen([_script("limpet-api"), server, f"--port={port}", "--log-level=warning"])
    try:
        deadline = time.monotonic() + START_S
        while not _is_listening(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("limpet-api did not start.")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(STOP_S)


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_ports() -> tuple[int, int, int]:
    """Three ports that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        grpc, http, metrics = (each.getsockname()[1] for each in sockets)
        return grpc, http, metrics


def _wait_ready(process: psutil.Popen, address: str) -> None:
    deadline = time.monotonic() + START_S
    with Client(address) as client:
        while (reason := client.why_not_ready()) is not None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"limpet-serve did not become ready: {reason}")
            time.sleep(0.05)


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text("ascii", "replace")
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def _script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))
