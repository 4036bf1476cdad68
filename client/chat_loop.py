"""The loop of limpet-chat: lines in, answers and commands' results out."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from limpet.client.client import Client
from limpet.client.errors import Cancelled, LimpetError
from limpet.client.options import Options
from limpet.client.session import Session
from limpet.client.stream import Stream
from limpet.client.terminal import Terminal

_HELP = """\
/reset          begin a new conversation
/system TEXT    begin a new conversation with this system prompt; without TEXT: show it
/stats          switch the line of counts under each answer on or off
/help           this
/quit           leave, as Ctrl-D does
Ctrl-C stops an answer. A message that begins with / is written with two of them."""
_STOP_WAIT_S = 2.0


class ChatLoop:
    """One person's chat; `num_errors` counts the questions that failed."""

    def __init__(self, client: Client, terminal: Terminal, system: str | None, options: Options) -> None:
        self._client = client
        self._terminal = terminal
        self._options = options
        self._system = system
        self._session = client.session(system=system)
        self._shows_stats = terminal.is_interactive
        self.num_errors = 0

    def run(self) -> None:
        """Until the input ends, /quit, or Ctrl-C twice at the prompt."""
        while (line := self._read()) is not None and line.strip() != "/quit":
            if line.startswith("/") and not line.startswith("//"):
                self._command(*line[1:].strip().partition(" ")[::2])
            elif line.strip():
                self._answer(line[1:] if line.startswith("//") else line)
        self._end_session()

    def _read(self) -> str | None:
        for hint in ("\nCtrl-C again or Ctrl-D leaves.", ""):
            try:
                return self._terminal.read_line()
            except KeyboardInterrupt:
                self._terminal.note(hint)
        return None

    def _command(self, name: str, rest: str) -> None:
        if name == "help":
            self._terminal.note(_HELP)
        elif name == "reset":
            self._begin(self._system)
        elif name == "system" and rest:
            self._begin(rest)
        elif name == "system":
            self._terminal.note(self._system or "(no system prompt)")
        elif name == "stats":
            self._shows_stats = not self._shows_stats
            self._terminal.note(f"counts {'on' if self._shows_stats else 'off'}")
        else:
            self._terminal.complain(f"There is no command /{name}; /help lists them.")

    def _begin(self, system: str | None) -> None:
        self._end_session()
        self._system = system
        self._session = self._client.session(system=system)
        self._terminal.note("new conversation")

    def _end_session(self) -> None:
        if self._session.history_tokens is not None:
            with contextlib.suppress(LimpetError):  # it expires by itself
                self._session.end()

    def _answer(self, question: str) -> None:
        try:
            stream = self._session.ask(question, stream=True, **self._options)
            with stream, _ctrl_c_stops(stream, self._session):
                for chunk in stream:
                    self._terminal.write(chunk.text)
        except Cancelled:
            pass  # by Ctrl-C
        except LimpetError as error:
            self.num_errors += 1
            self._terminal.complain(str(error))
            return
        self._terminal.write("\n")
        if self._shows_stats:
            self._terminal.note(stream.result.summary())


@contextlib.contextmanager
def _ctrl_c_stops(stream: Stream, session: Session) -> Iterator[None]:
    """While the answer comes, Ctrl-C asks the server to stop it; a second one drops it."""
    ended, asked = threading.Event(), threading.Event()

    def stop() -> None:
        with contextlib.suppress(LimpetError):
            session.cancel()
            ended.wait(_STOP_WAIT_S)
        if not ended.is_set():
            stream.close()

    def on_signal(number: int, frame: FrameType | None) -> None:
        # In a thread: the handler runs between any two instructions of the thread that reads the stream.
        threading.Thread(target=stream.close if asked.is_set() else stop, daemon=True).start()
        asked.set()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        ended.set()
        signal.signal(signal.SIGINT, before)
