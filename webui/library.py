"""A browser's conversations and choices, as they are kept in its own storage."""

import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

from limpet.client import SessionState
from limpet.client.wire import new_id

_VERSION = 1
_MAX_BYTES = 3_000_000  # a browser gives a site 5 MB, and the stored form is a third longer
_MAX_SEEN_LATELY = 256
_TITLE_LENGTH = 48


def empty_state() -> SessionState:
    """A session that has not begun."""
    return SessionState(id=new_id(), transcript=[], turns=[], history_tokens=None, server_turns=0)


@dataclass
class Record:
    """One conversation; `notes` has the line of counts under each answer, by turn."""

    id: str = field(default_factory=new_id)
    title: str = ""
    updated: float = 0.0  # seconds since 1970
    model: str = ""
    notes: list[str] = field(default_factory=list)
    state: SessionState = field(default_factory=empty_state)

    def copy(self) -> "Record":
        """One that can change on its own; the state's lists are never changed in place."""
        return replace(self, notes=list(self.notes))

    def touch(self) -> None:
        """Give it the time of now, and a title from its first question."""
        self.updated = time.time()
        first = next((str(each["content"]) for each in self.state["transcript"] if each["role"] == "user"), "")
        self.title = title_of(first)


def title_of(question: str) -> str:
    """A conversation's title by its first question: one line, cut to fit the list."""
    title = " ".join(question.split())
    return title if len(title) <= _TITLE_LENGTH else f"{title[: _TITLE_LENGTH - 1]}…"


class Library:
    """All conversations of one browser, shared by its tabs; of two versions of a conversation the newer one holds."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.choices: dict[str, Any] = {}
        self.version = 0  # counts the changes
        self._deleted: set[str] = set()

    def merge(self, stored: Mapping[str, Any]) -> None:
        """Take in what a tab brings from the browser's storage."""
        for each in stored.get("conversations", []):
            record = Record(**each)
            known = self.records.get(record.id)
            if record.id not in self._deleted and (known is None or known.updated < record.updated):
                self.records[record.id] = record
        self.choices = {**stored.get("choices", {}), **self.choices}

    def put(self, record: Record) -> None:
        """Keep a conversation's newest version; one without any turn is not worth it."""
        if not record.state["turns"]:
            return
        record.touch()
        self.records[record.id] = record.copy()
        self.version += 1

    def delete(self, id: str) -> None:
        """Forget a conversation for good."""
        self.records.pop(id, None)
        self._deleted.add(id)
        self.version += 1

    def newest_first(self) -> list[Record]:
        """The conversations in the order of the list that people see."""
        return sorted(self.records.values(), key=lambda record: -record.updated)

    def stored(self) -> dict[str, Any]:
        """What goes into the browser's storage: the oldest conversations are left out where it would overflow."""
        room = _MAX_BYTES
        kept: list[dict[str, Any]] = []
        for record in self.newest_first():
            entry = asdict(record)
            room -= len(json.dumps(entry))
            if room < 0 and kept:
                break
            kept.append(entry)
        return {"version": _VERSION, "choices": self.choices, "conversations": kept}


class Libraries:
    """The libraries of browsers with a tab open, now or lately: what a closed tab left is stored nowhere else."""

    def __init__(self) -> None:
        self._by_browser: WeakValueDictionary[str, Library] = WeakValueDictionary()
        self._seen_lately: deque[Library] = deque(maxlen=_MAX_SEEN_LATELY)

    def open(self, browser: str, stored: Any) -> Library:
        """The library of that browser, with what its storage holds; anything unreadable there counts as empty.

        `browser` "" stands for one that does not say which it is: its tabs share nothing while they are open.
        """
        library = self._by_browser.setdefault(browser or new_id(), Library())
        self._seen_lately.append(library)
        if isinstance(stored, dict) and stored.get("version") == _VERSION:
            library.merge(stored)
        return library
