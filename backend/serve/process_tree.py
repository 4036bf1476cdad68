"""tritonserver and whatever it starts, as one tree that never outlives limpet-serve.

tritonserver gets SIGKILL from the kernel when limpet-serve dies (PR_SET_PDEATHSIG); its stubs and the engine notice the
end of tritonserver themselves. While limpet-serve lives it adopts what tritonserver leaves behind (it is a subreaper),
so everything still alive is a child of its own: nobody else's process is ever signalled.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

_ROLES = {"limpet.backend.engine_process": "The engine", "limpet.backend.ranks.rank_process": "A rank of the engine"}
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


class ProcessTree:
    """The running server; `pidfd` becomes readable when tritonserver ends."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        parent = os.getpid()

        def die_with_parent() -> None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        # A session of its own: Ctrl-C in the terminal reaches limpet-serve alone, which drains first.
        self._server = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent
        )
        self.pidfd = os.pidfd_open(self._server.pid)
        self._stubs: dict[int, str] = {}  # what each Python backend process serves, by pid
        self._zombies: set[int] = set()

    def exit_code(self) -> int | None:
        """tritonserver's exit code (negative: the signal that killed it), None while it runs."""
        return self._server.poll()

    def reap_orphans(self) -> None:
        """Collect adopted processes that ended while tritonserver runs on."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while (ended := os.waitid(os.P_ALL, 0, flags)) is not None and ended.si_pid != self._server.pid:
            os.waitpid(ended.si_pid, 0)

    def dead_stub(self) -> str | None:
        """The model whose Python backend process died, found at the second look; look once a second or less.

        tritonserver collects a stub that it ended itself; one that died stays its zombie, and nobody is told.
        """
        zombies = set()
        for child in psutil.Process(self._server.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.pid in self._stubs and child.status() == psutil.STATUS_ZOMBIE:
                    zombies.add(child.pid)
                elif (model := _model_of(child.cmdline())) is not None:
                    self._stubs[child.pid] = model
        lasting, self._zombies = zombies & self._zombies, zombies
        return next((self._stubs[pid] for pid in lasting), None)

    def terminate(self, grace_s: float) -> bool:
        """SIGTERM to tritonserver, SIGKILL after `grace_s`; returns whether it ended by itself."""
        self._server.terminate()
        try:
            self._server.wait(grace_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self, grace_s: float) -> list[str]:
        """SIGKILL to tritonserver, `grace_s` for what it started, then SIGKILL for the rest; returns what they were."""
        self._server.kill()
        self._server.wait()
        deadline = time.monotonic() + grace_s
        killed: dict[int, str] = {}  # by pid: the child of another killed one is listed again as its zombie
        # An ended parent hands its children to us, so look again until there are none.
        while orphans := psutil.Process().children(recursive=True):
            patience = deadline - time.monotonic()
            if patience <= 0:
                killed |= {process.pid: _kill(process) for process in orphans if process.pid not in killed}
            psutil.wait_procs(orphans, timeout=max(0.1, patience))
        os.close(self.pidfd)
        return list(killed.values())


def _model_of(command: list[str]) -> str | None:
    """A stub's first argument is .../MODEL/VERSION/model.py; None for another process."""
    is_stub = len(command) > 1 and command[0].endswith("triton_python_backend_stub")
    return Path(command[1]).parent.parent.name if is_stub else None


def _kill(process: psutil.Process) -> str:
    role = "A process"
    with contextlib.suppress(psutil.NoSuchProcess):
        role = _role(process.cmdline())
        process.kill()
    return f"{role} ({process.pid})"


def _role(command: list[str]) -> str:
    """What a process of the tree is, for a message."""
    if (model := _model_of(command)) is not None:
        return f"The Python backend process of {model}"
    program = Path(command[0]).name if command else "unknown"
    return next((role for module, role in _ROLES.items() if module in command), f"The process {program}")
