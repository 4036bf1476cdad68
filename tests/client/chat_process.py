"""limpet-chat in a real pseudo-terminal, or with pipes."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

WAIT_S = 60.0
PATIENCE_S = 5.0  # of a person who pressed a key to no effect
# Makes standard input the controlling terminal, so that Ctrl-C becomes SIGINT. Not as a preexec_fn: forking disturbs
# the gRPC server that runs in the test's own process.
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def command(name: str) -> str:
    """An installed command of this environment."""
    return str(Path(sys.executable).with_name(name))


class ChatTerminal:
    """A person at a terminal: types, and reads what appears."""

    def __init__(self, arguments: list[str], home: Path) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(home), "HOME": str(home)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, command("limpet-chat"), *arguments],
            stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self._seen = ""

    def expect(self, text: str) -> str:
        """Wait until `text` appears; returns what stood before it, escape sequences removed."""
        deadline = time.monotonic() + WAIT_S
        while text not in self._seen:
            assert select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))[0], self._missing(text)
            self._seen += self._read(text)
        before, _, self._seen = self._seen.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def ctrl_c(self) -> None:
        self.type("\x03")

    def ctrl_c_until(self, happened: Callable[[float], bool]) -> None:
        """Ctrl-C at the prompt, and again: CPython's readline misses one that comes just before it waits for a key."""
        deadline = time.monotonic() + WAIT_S
        self.ctrl_c()
        while not happened(PATIENCE_S):
            assert time.monotonic() < deadline, f"Ctrl-C had no effect: {self._seen!r}"
            self.ctrl_c()

    def shows(self, text: str) -> Callable[[float], bool]:
        """Whether `text` appears within so many seconds."""

        def appeared(timeout_s: float) -> bool:
            deadline = time.monotonic() + timeout_s
            while (
                text not in self._seen
                and select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))[0]
            ):
                self._seen += self._read(text)
            return text in self._seen

        return appeared

    def has_ended(self, timeout_s: float) -> bool:
        """Whether the process ends within so many seconds."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def ctrl_d(self) -> None:
        self.type("\x04")

    def wait(self) -> int:
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._master)

    def _read(self, text: str) -> str:
        try:
            part = os.read(self._master, 65536)
        except OSError:
            raise AssertionError(f"limpet-chat ended. {self._missing(text)}") from None
        return _ESCAPES.sub("", part.decode("utf-8", "replace"))

    def _missing(self, text: str) -> str:
        return f"{text!r} did not appear, but {self._seen!r}"


@contextmanager
def chat_terminal(*arguments: str, home: Path) -> Iterator[ChatTerminal]:
    """A chat that is killed in the end if it still runs."""
    terminal = ChatTerminal(list(arguments), home)
    try:
        yield terminal
    finally:
        terminal.close()


def chat_pipe(*arguments: str, lines: str) -> "subprocess.CompletedProcess[str]":
    """A chat with pipes: `lines` in, everything out."""
    return subprocess.run(
        [command("limpet-chat"), *arguments], input=lines, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
