"""Finds the engine of a model, or starts it; any front end may be the one that does."""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

from limpet.backend.link.ownership import EXIT_NOT_OWNER, EngineRuntime, EngineState, OwnershipError

_OTHER_ENGINE_PATIENCE_S = 30.0  # for an engine with other settings to leave
_LOSER_PATIENCE_S = 10.0
_logger = logging.getLogger(__name__)


class EngineStartError(Exception):
    """No engine could be started; one sentence says why."""


class EngineProcess:
    """A running engine, held by a pidfd: its number cannot be taken for another process."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError if it is gone."""
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)

    def kill(self) -> None:
        """SIGKILL; nothing if it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.pidfd)


class EngineWatcher:
    """Finds the engine of a model whatever its settings, and leaves it to the front ends: for limpet_admin."""

    def __init__(self, runtime: EngineRuntime) -> None:
        self._runtime = runtime

    def find(self) -> EngineProcess | None:
        """The engine, if one runs."""
        state = self._runtime.state()
        return None if state is None else self._hold(state)

    def reap(self, pid: int) -> str | None:
        """How an ended engine ended; None if its starter is another process."""
        return None

    def end(self, engine: EngineProcess) -> None:
        """What is to be done about an engine that hangs."""

    def _hold(self, state: EngineState) -> EngineProcess | None:
        try:
            engine = EngineProcess(state.pid)
        except ProcessLookupError:
            return None
        if self._runtime.state() == state:
            return engine
        engine.close()
        return None


class EngineKeeper(EngineWatcher):
    """One front end's view of who runs the engine; `find` is called until it answers."""

    def __init__(self, runtime: EngineRuntime, digest: str, spawn: Callable[[], "subprocess.Popen[bytes]"]) -> None:
        super().__init__(runtime)
        self._digest = digest
        self._spawn = spawn
        self._child: subprocess.Popen[bytes] | None = None
        self._other_since: float | None = None

    def find(self) -> EngineProcess | None:
        """The engine if one with our settings runs, else None, having started one where tritonserver lacks it.

        Raises EngineStartError if the engine that we started ended, or one with other settings does not leave.
        """
        state = self._runtime.state()
        if state is not None and state.digest == self._digest:
            self._other_since = None
            self._await_loser(state.pid)
            return self._hold(state)
        self._check_child()
        if state is not None:
            self._check_patience()
        elif self._child is None and not self._runtime.is_locked() and self._runtime.has_server:
            self._child = self._start()
            _logger.info("Started an engine, process %d.", self._child.pid)
        return None

    def reap(self, pid: int) -> str | None:
        if self._child is None or self._child.pid != pid:
            return None
        code = self._child.wait()
        self._child = None
        return f"exit code {code}" if code >= 0 else f"signal {-code}"

    def end(self, engine: EngineProcess) -> None:
        """Kill an engine that hangs, so that the next one can start."""
        _logger.error("The engine, process %d, does not answer: killed.", engine.pid)
        engine.kill()

    def _start(self) -> "subprocess.Popen[bytes]":
        try:
            return self._spawn()
        except (OwnershipError, OSError) as error:
            raise EngineStartError(f"The engine cannot be started: {error}") from None

    def _await_loser(self, owner: int) -> None:
        """Our own engine ends at once if another one holds the lock."""
        if self._child is not None and self._child.pid != owner:
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(_LOSER_PATIENCE_S)
                self._child = None

    def _check_child(self) -> None:
        code = self._child.poll() if self._child is not None else None
        if code is None:
            return
        self._child = None
        if code != EXIT_NOT_OWNER:
            raise EngineStartError(f"The engine ended with exit code {code} while it started; the log says why.")

    def _check_patience(self) -> None:
        now = time.monotonic()
        self._other_since = self._other_since or now
        if now - self._other_since > _OTHER_ENGINE_PATIENCE_S:
            self._other_since = None
            raise EngineStartError(
                "An engine of this model with other settings is still running and did not leave within "
                f"{_OTHER_ENGINE_PATIENCE_S:.0f} s: unload the models that use it first."
            )
