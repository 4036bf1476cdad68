"""Who runs a model's engine: one folder per engine, a lock that the engine itself holds, its pid to watch.

${LIMPET_RUNTIME_DIR} or <tmp>/limpet-<uid>/     0700
    <server pid>-<its start time>-<model>/       one engine: of one tritonserver and one model folder
        lock          flock, held by the engine as long as it lives
        engine.json   EngineState, written by the holder of the lock
        engine.sock   the link's ROUTER socket
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

EXIT_NOT_OWNER = os.EX_TEMPFAIL  # exit code of an engine process that found the lock taken
_MAX_SOCKET_PATH_BYTES = 107  # sun_path of Linux, less its final zero
_PROBE_PATIENCE_S = 0.5  # a front end that probes the lock holds it for microseconds


class OwnershipError(Exception):
    """The engine's runtime folder cannot be used; one sentence says why."""


class EngineState(msgspec.Struct, frozen=True):
    """What the holder of the lock says about itself."""

    pid: int
    digest: str  # of the settings it was started with


def settings_digest(parameters: Mapping[str, str]) -> str:
    """Digest of a model's parameters: engines with equal digests are interchangeable."""
    return hashlib.sha256(msgspec.json.encode(dict(parameters), order="deterministic")).hexdigest()


def process_start_ticks(pid: int) -> int | None:
    """Start time of a running process in clock ticks since boot, None if it has ended (proc(5), fields 3 and 22)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except OSError:
        return None
    state, *fields = stat.rsplit(")", 1)[1].split()
    return None if state in "ZX" else int(fields[18])


def runtime_root() -> Path:
    """The folder of all engines of this user."""
    configured = os.environ.get("LIMPET_RUNTIME_DIR")
    return Path(configured) if configured else Path(tempfile.gettempdir()) / f"limpet-{os.getuid()}"


class EngineRuntime:
    """Paths and ownership of one engine; made from the model by a front end, from its folder by the engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock_path = folder / "lock"
        self.state_path = folder / "engine.json"
        self.socket_path = folder / "engine.sock"
        self.address = f"ipc://{self.socket_path}"
        self._lock_fd: int | None = None

    @classmethod
    def for_model(cls, model_dir: Path, server_pid: int) -> "EngineRuntime":
        """Raises OwnershipError if there is no such server process."""
        start = process_start_ticks(server_pid)
        if start is None:
            raise OwnershipError(f"There is no tritonserver with process id {server_pid}.")
        model = hashlib.sha256(os.fsencode(model_dir.resolve())).hexdigest()[:12]
        return cls(runtime_root() / f"{server_pid}-{start}-{model}")

    @property
    def has_server(self) -> bool:
        """Whether the tritonserver of this engine still runs."""
        pid, start, _ = self.folder.name.split("-", 2)
        return process_start_ticks(int(pid)) == int(start)

    def prepare(self) -> None:
        """Make the folder, closed to other users; raises OwnershipError if it cannot serve."""
        if len(os.fsencode(self.socket_path)) > _MAX_SOCKET_PATH_BYTES:
            raise OwnershipError(
                f"The socket path {self.socket_path} is longer than {_MAX_SOCKET_PATH_BYTES} bytes: set "
                "LIMPET_RUNTIME_DIR to a shorter folder."
            )
        for folder in (self.folder.parent, self.folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise OwnershipError(
                    f"The runtime folder {folder} must belong to this user and be closed to others (mode 0700)."
                )

    def take_lock(self, digest: str) -> bool:
        """Become the engine: hold the lock until this process ends and publish EngineState; False if another is."""
        self.prepare()
        deadline = time.monotonic() + _PROBE_PATIENCE_S
        while (fd := self._try_lock()) is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        self._lock_fd = fd
        self._publish(EngineState(pid=os.getpid(), digest=digest))
        return True

    def is_locked(self) -> bool:
        """Whether an engine holds the lock now."""
        try:
            fd = os.open(self.lock_path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def state(self) -> EngineState | None:
        """The running engine; None if none holds the lock or it has not introduced itself yet."""
        if not self.is_locked():
            return None
        try:
            state = msgspec.json.decode(self.state_path.read_bytes(), type=EngineState)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
        return state if process_start_ticks(state.pid) is not None else None

    def spawn(self, model_dir: Path, server_pid: int, parameters: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        """Start an engine process; it ends with EXIT_NOT_OWNER if another one was quicker."""
        self.prepare()
        flags = ["--runtime", str(self.folder), "--model", str(model_dir), "--server-pid", str(server_pid)]
        command = [sys.executable, "-m", "limpet.backend.engine_process", *flags]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(msgspec.json.encode(dict(parameters)))
        return process

    def remove(self) -> None:
        """Delete the folder: by the engine as its last act, or by whoever finds it without an engine."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _try_lock(self) -> int | None:
        fd = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The file may have been removed between open and flock: then this lock guards nothing.
            if os.stat(self.lock_path).st_ino == os.fstat(fd).st_ino:
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(fd)
        return None

    def _publish(self, state: EngineState) -> None:
        temporary = self.state_path.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(state))
        temporary.replace(self.state_path)


def engines_under(root: Path) -> list[EngineRuntime]:
    """The engines, living and dead, whose folders lie in `root` beside whatever else lies there."""
    return [EngineRuntime(folder) for folder in root.glob("[0-9]*-[0-9]*-*")]


def sweep_dead_engines(root: Path) -> None:
    """Remove the folders under `root` whose server is gone and whose lock nobody holds (left by kill -9)."""
    for runtime in engines_under(root):
        if not runtime.has_server and not runtime.is_locked():
            runtime.remove()
