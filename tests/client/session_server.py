"""A fake server that keeps sessions by the wire contract; a character is a token."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.client.fake_server import Asked, Response, data, error


@dataclass
class Kept:
    """One session: its history as text and where each turn begins."""

    history: str = ""
    turns: list[int] = field(default_factory=list)
    cancel: threading.Event = field(default_factory=threading.Event)
    running: bool = False


def echo(question: str) -> str:
    """The default reply."""
    return f"<{question}>"


class SessionServer:
    """Give `answer` and `admin` to a FakeServer. `pause` is asked before each character of a reply."""

    def __init__(self) -> None:
        self.reply: Callable[[str], str] = echo
        self.pause: Callable[[Kept], None] = lambda kept: None
        self.sessions: dict[str, Kept] = {}

    def answer(self, asked: Asked) -> Iterator[Response]:
        if "sequence_id" not in asked.parameters:
            yield from self._stateless(asked)
            return
        name = asked.parameters["sequence_id"]
        if asked.parameters["sequence_end"]:
            if (ended := self.sessions.pop(name, None)) is not None:
                ended.cancel.set()
            yield data("", "stop", session_tokens=0)
            return
        if asked.parameters["sequence_start"]:
            self.sessions[name] = Kept()
        if name not in self.sessions:
            yield error("[NOT_FOUND] session not found: it expired.")
        elif self.sessions[name].running:
            yield error("[UNAVAILABLE] session busy: a turn is running.")
        else:
            yield from self._turn(asked, self.sessions[name])

    def admin(self, operation: dict[str, Any]) -> dict[str, Any]:
        if operation["op"] == "sessions":
            return self._fork(operation)
        if operation["op"] == "cancel":
            kept = self.sessions.get(operation.get("session_id", ""))
            if kept is not None:
                kept.cancel.set()
            return {"cancelled": int(kept is not None and kept.running)}
        return {"ready": True}

    def _fork(self, operation: dict[str, Any]) -> dict[str, Any]:
        """What the action fork of op sessions answers; the fake has no other."""
        assert operation["action"] == "fork"
        source, name = self.sessions[operation["session_id"]], operation["new_session_id"]
        self.sessions[name] = Kept(source.history, list(source.turns))
        return {"session": {"session_id": name}}

    def _stateless(self, asked: Asked) -> Iterator[Response]:
        question = asked.messages[-1]["content"] if "messages" in asked.inputs else asked.inputs["text_input"]
        yield data(self.reply(question), "stop")

    def _turn(self, asked: Asked, kept: Kept) -> Iterator[Response]:
        self._cut(kept, asked)
        cached = max(len(kept.history) - 1, 0)
        new = (
            asked.messages if "messages" in asked.inputs else [{"role": "user", "content": asked.inputs["text_input"]}]
        )
        prompt = "".join(f"{message['role'][0]}:{message['content']};" for message in new)
        kept.turns.append(len(kept.history))
        kept.history += prompt
        kept.cancel.clear()
        kept.running = True
        asked.gone.clear()
        counts = {"num_input": len(prompt), "num_cached": cached}
        try:
            yield from self._characters(asked, kept, self.reply(new[-1]["content"]), counts)
        finally:
            kept.running = False

    def _characters(self, asked: Asked, kept: Kept, reply: str, counts: dict[str, int]) -> Iterator[Response]:
        streams = asked.inputs["stream"]
        budget = asked.options.get("max_tokens", len(reply))
        finish = "stop" if budget >= len(reply) else "length"
        sent = ""
        for character in reply[:budget]:
            self.pause(kept)
            if kept.cancel.is_set() or asked.gone.is_set():
                finish = "cancelled"
                break
            sent += character
            kept.history += character
            if streams and len(sent) < min(budget, len(reply)):
                yield data(character, session_tokens=len(kept.history), **counts)
        unsent = sent[-1:] if streams and finish != "cancelled" else "" if streams else sent
        yield data(unsent, finish, session_tokens=len(kept.history), **counts)

    def _cut(self, kept: Kept, asked: Asked) -> None:
        tokens = asked.parameters.get("session_tokens", len(kept.history))
        assert tokens <= len(kept.history)
        kept.history = kept.history[:tokens]
        kept.turns = [turn for turn in kept.turns if turn < tokens or tokens == 0]
        if rewind := asked.parameters.get("session_rewind", 0):
            assert rewind <= len(kept.turns)
            kept.history = kept.history[: kept.turns[-rewind]]
            del kept.turns[-rewind:]


def as_json(value: object) -> Any:
    """What is left of a value after a trip through JSON."""
    return json.loads(json.dumps(value))
