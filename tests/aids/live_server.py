"""A real tritonserver started through limpet-serve, and the proof that nothing of it is left afterwards."""

import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

LIMPET_SERVE = Path(sys.executable).with_name("limpet-serve")
_MARK = "LIMPET_TEST_SERVER"
READY_S = 120.0
GONE_S = 30.0


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class LiveServer:
    """One limpet-serve process with everything that it starts; its processes are known by a mark they inherit."""

    def __init__(self, repository: Path, flags: Sequence[str] = (), environment: dict[str, str] | None = None) -> None:
        self.repository = repository
        self.grpc_port, self.http_port, self.metrics_port = self._ports = free_ports(3)
        self.target = f"127.0.0.1:{self.grpc_port}"
        self.http = f"http://127.0.0.1:{self.http_port}"
        self.folder = Path(tempfile.mkdtemp(prefix="lt-", dir="/tmp"))  # short: it holds Unix sockets
        self.log_path = self.folder.with_suffix(".log")
        self._mark = uuid.uuid4().hex
        self._regions: set[str] = set()
        ports = zip(("grpc", "http", "metrics"), self._ports, strict=True)
        self.flags = [
            f"--model-repository={repository}",
            *(f"--{name}-port={port}" for name, port in ports),
            *flags,
        ]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [LIMPET_SERVE, *self.flags],
                env={**os.environ, **(environment or {}), "TMPDIR": str(self.folder), _MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def wait_ready(self, timeout_s: float = READY_S) -> str:
        """Returns the printed summary; fails with the log's end if the server ends or the time is over first."""
        assert self.process.stdout is not None
        printed = b""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"Ctrl-C" not in printed:
                assert selector.select(deadline - time.monotonic()), f"not ready in time\n{self.log()}"
                part = os.read(self.process.stdout.fileno(), 65536)
                assert part, f"ended with code {self.process.wait(GONE_S)}\n{self.log()}"
                printed += part
        return printed.decode()

    def log(self) -> str:
        """What limpet-serve and its processes wrote to stderr."""
        return self.log_path.read_text("utf-8", "replace")[-8000:]

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Living processes of this server whose command line contains `name`; limpet-serve itself is one."""
        mark = f"{_MARK}={self._mark}".encode()
        return [process for process in psutil.process_iter() if _has(process, mark) and name in _command(process)]

    def only(self, name: str) -> psutil.Process:
        """The one process whose command line contains `name`."""
        found = self.processes(name)
        assert len(found) == 1, f"{name}: {[_command(process) for process in found]}"
        return found[0]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal limpet-serve, wait for it, check that nothing is left; returns its exit code."""
        self.note_regions()
        self.process.send_signal(number)
        return self.wait_end()

    def wait_end(self) -> int:
        """Wait for limpet-serve's end and check that nothing is left; returns its exit code."""
        self.note_regions()
        code = self.process.wait(GONE_S)
        self.assert_nothing_left()
        return code

    def note_regions(self) -> None:
        """Remember the shared-memory files that the processes have mapped now, and those under the folder's name."""
        for process in self.processes():
            self._regions |= _mapped_regions(process.pid)
        for folder in self.folder.glob("limpet-*"):
            self._regions |= {str(region) for region in Path("/dev/shm").glob(f"{folder.name}-*")}

    def assert_nothing_left(self) -> None:
        """No process, port, socket, runtime folder or shared-memory file; waits up to GONE_S for the processes."""
        assert not [_command(process) for process in wait_ended(self.processes(), GONE_S)]
        assert not [path for path in self._regions if Path(path).exists()]
        assert not list(self.folder.rglob("*"))
        for port in self._ports:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))

    def discard(self) -> None:
        """Last resort of a failed test: end what lives and delete what lies there."""
        self.note_regions()
        for process in self.processes():
            process.kill()
        self.process.wait(GONE_S)
        wait_ended(self.processes(), GONE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        for path in self._regions:
            Path(path).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.log_path.unlink(missing_ok=True)


@contextmanager
def live_server(
    repository: Path, flags: Sequence[str] = (), environment: dict[str, str] | None = None
) -> Iterator[LiveServer]:
    """A server that is discarded in the end, whatever the test did to it."""
    server = LiveServer(repository, flags, environment)
    try:
        yield server
    finally:
        server.discard()


def shared_server(repository: Path) -> Iterator[LiveServer]:
    """For a fixture: a server for many tests; whatever they did, it must stop cleanly and leave nothing."""
    with live_server(repository, ["--drain-deadline=5"]) as server:
        server.wait_ready()
        yield server
        assert server.stop() == 0


def kill(processes: Iterable[psutil.Process]) -> None:
    """kill -9, as the kernel's out-of-memory killer would."""
    for process in processes:
        process.kill()


def wait_ended(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that still run after the time; one that ended and that nobody collected yet does not count."""
    deadline = time.monotonic() + timeout_s
    return [process for process in processes if not _ended(process.pid, deadline)]


def _ended(pid: int, deadline: float) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))[0])
    finally:
        os.close(pidfd)


def _has(process: psutil.Process, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _mapped_regions(pid: int) -> set[str]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text("utf-8", "replace")
    except OSError:
        return set()
    return {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/dev/shm/" in line and "(deleted)" not in line}
