"""One server's private folder and its shared-memory files: made before tritonserver starts, removed after it ended."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_LOCK = "serve.lock"
_MAX_BASE_BYTES = 40  # leaves room for the engine's socket under the 107 bytes of a Unix socket's path


class RuntimeFolder:
    """A 0700 folder for sockets and links; its name is also the prefix of the server's shared-memory files.

    limpet-serve holds a lock in it, so a later one can tell which folders a kill -9 left behind.
    """

    def __init__(self) -> None:
        base = Path(tempfile.gettempdir())
        if len(os.fsencode(base)) > _MAX_BASE_BYTES:
            base = Path("/tmp")
        _sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix="limpet-", dir=base))
        unlocked = self.path / "serve.lock.new"
        self._lock_fd = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        unlocked.rename(self.path / _LOCK)

    @property
    def shm_prefix(self) -> str:
        return _shm_prefix(self.path)

    def front_end_death(self) -> str | None:
        """The cause that an engine wrote when it lost a front end, whose clients' streams stay silent in Triton."""
        try:
            return (self.path / "front-end-died").read_text("utf-8").strip() or None
        except FileNotFoundError:
            return None

    def remove(self) -> None:
        """Delete folder and shared-memory files; only once no process of the server lives. Others may help."""
        _remove(self.path)
        os.close(self._lock_fd)


def _shm_prefix(folder: Path) -> str:
    return f"{folder.name}-"


def _remove(folder: Path) -> None:
    for region in _SHARED_MEMORY.glob(f"{_shm_prefix(folder)}*"):
        region.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _sweep(base: Path) -> None:
    """Remove what servers left whose limpet-serve was killed before an engine could clean up for it."""
    for lock in base.glob(f"limpet-*/{_LOCK}"):
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or just removed
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(lock.parent)
        except BlockingIOError:
            continue  # its limpet-serve lives
        finally:
            os.close(fd)
