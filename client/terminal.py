"""What limpet-chat reads from and writes to: a terminal with line editing, or a pipe."""

import contextlib
import os
import re
import sys
from pathlib import Path

try:
    import readline
except ImportError:  # a Python built without it: input() then has no line editing
    readline = None  # type: ignore[assignment]

_HISTORY_LINES = 1000
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Terminal:
    """Standard input and output of one chat; `is_interactive` if a person sits there."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._history = _history_path() if self.is_interactive and readline is not None else None
        self._status_shown = False
        self._inside_line = False  # the last line of the answer has no end yet
        if self._history is not None:
            with contextlib.suppress(OSError):
                readline.read_history_file(self._history)
            readline.set_history_length(_HISTORY_LINES)

    def read_line(self) -> str | None:
        """The next line typed; None at the end of the input. Ctrl-C raises KeyboardInterrupt."""
        try:
            return input("> " if self.is_interactive else "")
        except EOFError:
            return None
        except UnicodeDecodeError:
            self.complain("That line is no valid UTF-8.")
            return ""

    def write(self, text: str) -> None:
        """A piece of the answer, at once. A terminal gets no control characters: they could rewrite what it shows."""
        if self.is_interactive:  # a carriage return says nothing before a line feed, and elsewhere rewrites the line
            text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r", ""))
        print(text, end="", flush=True)
        self._inside_line = not text.endswith("\n") if text else self._inside_line

    def note(self, line: str) -> None:
        """A line that is not part of the answer: dim on a terminal, else to standard error."""
        shown, file = (f"\x1b[2m{line}\x1b[0m", sys.stdout) if self.is_interactive else (line, sys.stderr)
        print(shown, file=file, flush=True)

    def show_status(self, line: str) -> None:
        """A line that the next one replaces; nothing where no person sits."""
        if sys.stderr.isatty():
            print(f"\r\x1b[2K\x1b[2m{line}\x1b[0m", end="", file=sys.stderr, flush=True)
            self._status_shown = True

    def end_status(self) -> None:
        """Keep the last status line and go on below it."""
        if self._status_shown:
            print(file=sys.stderr, flush=True)
            self._status_shown = False

    def complain(self, line: str) -> None:
        """An error, to standard error, on a line of its own."""
        self.end_status()
        if self._inside_line:
            self.write("\n")
        print(f"\x1b[31m{line}\x1b[0m" if sys.stderr.isatty() else line, file=sys.stderr, flush=True)

    def save_history(self) -> None:
        """Keep the lines typed for the next chat."""
        if self._history is not None:
            with contextlib.suppress(OSError):
                self._history.parent.mkdir(parents=True, exist_ok=True)
                readline.write_history_file(self._history)


def _history_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "limpet" / "chat_history"
