"""Ctrl-C, SIGTERM and SIGHUP as a descriptor to wait on instead of an exception at any place."""

import contextlib
import os
import signal
from types import FrameType

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Context manager; while it is open the signals only count, and make `fd` readable."""

    def __init__(self) -> None:
        self.received = 0
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> "StopSignals":
        self._previous = {number: signal.signal(number, self._count) for number in _STOP}
        self._previous_fd = signal.set_wakeup_fd(self._write_fd)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._write_fd)

    def clear(self) -> None:
        """Make `fd` wait for the next signal again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def _count(self, _number: int, _frame: FrameType | None) -> None:
        self.received += 1
