"""Sessions on disk: SQLite in WAL mode, written by a thread that puts all that has gathered into one commit. No torch.

    sessions(id, last_used, tokens, turns)    one row a session: its history as int32, its turns as msgpack
    meta(name, value)                         `model`: which tokenizer the ids belong to

`save` and `delete` only note what is to be written; `when_stored` says when all that was noted before is committed.
What could not be written stays noted for the next commit. A commit outlives the death of every process; only losing
power may cost the last ones (WAL with synchronous=NORMAL), and never damages the file. One engine holds the file at a
time.
"""

import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from limpet.backend.history import History, Turn, token_array

logger = logging.getLogger(__name__)

_APPLICATION_ID = 0x4C4D5054  # "LMPT"
_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE sessions (id TEXT PRIMARY KEY, last_used REAL NOT NULL, tokens BLOB NOT NULL, turns BLOB NOT NULL);
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_LOCK_PATIENCE_S = 5.0  # for an engine that is just ending


class StoreError(Exception):
    """The store cannot be used; one sentence says why."""


@dataclass(frozen=True)
class StoredSession:
    """A session as it is on disk; `last_used` is in seconds since 1970."""

    id: str
    history: History
    last_used: float


class _TurnRecord(msgspec.Struct, array_like=True):
    messages: str | None
    reply: bytes
    end: int


Callback: TypeAlias = Callable[[StoreError | None], None]


class SessionStore:
    """The sessions of one engine in the file `path`, which is made if it is not there.

    `model` names the tokenizer. Raises StoreError for a file that cannot be written, or is none of ours. All methods
    belong to the engine's thread; `on_commit` is called on the store's own.
    """

    def __init__(self, path: Path, model: str, on_commit: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self.on_commit = on_commit
        self._connection = _open(path, model)
        self._changed = threading.Condition()
        self._pending: dict[str, StoredSession | None] = {}  # None: deleted
        self._waiting: list[Callback] = []
        self._committed: deque[tuple[list[Callback], StoreError | None]] = deque()
        self._has_news = False
        self._is_closing = False
        self.num_commits = 0
        self._writer = threading.Thread(target=self._write, name="limpet-store", daemon=True)
        self._writer.start()

    def load(self) -> list[StoredSession]:
        """All sessions, the least recently used first; call it before the first change. Raises StoreError."""
        query = "SELECT id, last_used, tokens, turns FROM sessions ORDER BY last_used, rowid"
        try:
            [verdict] = self._connection.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise ValueError(" ".join(verdict.split()))
            rows = self._connection.execute(query)
            return [StoredSession(id, _history(tokens, turns), float(used)) for id, used, tokens, turns in rows]
        except (sqlite3.Error, msgspec.DecodeError, ValueError, TypeError) as error:
            advice = "it is damaged; move it away to begin without its sessions"
            raise StoreError(f"session_store {self._path} cannot be read ({error}): {advice}.") from None

    def save(self, session: StoredSession) -> None:
        self._note(session.id, session)

    def delete(self, session_id: str) -> None:
        self._note(session_id, None)

    def when_stored(self, callback: Callback) -> None:
        """Have `run_callbacks` call it once all changes so far are committed, or with the reason why they are not."""
        with self._changed:
            self._waiting.append(callback)
            self._wake()

    def run_callbacks(self) -> None:
        while self._committed:
            callbacks, error = self._committed.popleft()
            for callback in callbacks:
                callback(error)

    def close(self) -> None:
        """Commit what is noted, and let go of the file."""
        with self._changed:
            self._is_closing = True
            self._wake()
        self._writer.join()
        self._connection.close()

    def _note(self, session_id: str, session: StoredSession | None) -> None:
        with self._changed:
            self._pending[session_id] = session
            self._wake()

    def _wake(self) -> None:
        self._has_news = True
        self._changed.notify()

    # ---- the writer's thread

    def _write(self) -> None:
        is_closing = False
        while not is_closing:
            with self._changed:
                self._changed.wait_for(lambda: self._has_news)
                self._has_news, is_closing = False, self._is_closing
                changes, self._pending = self._pending, {}
                waiting, self._waiting = self._waiting, []
            error = self._commit(changes)
            if error is not None:
                with self._changed:
                    self._pending = {**changes, **self._pending}
            self._committed.append((waiting, error))
            self.on_commit()

    def _commit(self, changes: dict[str, StoredSession | None]) -> StoreError | None:
        if not changes:
            return None
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("REPLACE INTO sessions VALUES (?, ?, ?, ?)", _rows(changes.values()))
            ended = [(session_id,) for session_id, session in changes.items() if session is None]
            self._connection.executemany("DELETE FROM sessions WHERE id = ?", ended)
            self._connection.execute("COMMIT")
        except Exception as error:  # whatever it is, those who wait must hear of it
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            is_known = isinstance(error, sqlite3.Error)
            logger.error(
                "%d changes of sessions could not be written to %s: %s.",
                *(len(changes), self._path, error),
                exc_info=not is_known,
            )
            return StoreError(f"The session store cannot be written ({error}): the change is kept in memory only.")
        self.num_commits += 1
        return None


def since_1970(monotonic: float) -> float:
    """The wall clock's time at a time of time.monotonic()."""
    return time.time() - (time.monotonic() - monotonic)


def _rows(sessions: Iterable[StoredSession | None]) -> Iterable[tuple[str, float, bytes, bytes]]:
    for session in sessions:
        if session is not None:
            turns = [_TurnRecord(turn.messages, turn.reply.tobytes(), turn.end) for turn in session.history.turns]
            yield session.id, session.last_used, session.history.tokens.tobytes(), msgspec.msgpack.encode(turns)


def _history(tokens: bytes, turns: bytes) -> History:
    """Raises DecodeError or ValueError for what is no history."""
    records = msgspec.msgpack.decode(turns, type=list[_TurnRecord])
    history = History(token_array(tokens), [Turn(each.messages, token_array(each.reply), each.end) for each in records])
    if (records[-1].end if records else 0) != len(history.tokens):
        raise ValueError("a session's turns and tokens disagree")
    return history


def _open(path: Path, model: str) -> sqlite3.Connection:
    """The file, locked for this engine alone and seen to be writable; one that is not ours is left as it is."""
    connection = None
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # conversations are nobody else's business
        connection = sqlite3.connect(path, _LOCK_PATIENCE_S, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        _check_ours(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN EXCLUSIVE")
        _prepare(connection, model)
        connection.execute("COMMIT")
        return connection
    except (OSError, sqlite3.Error, StoreError) as error:
        if connection is not None:
            connection.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        reason = "another engine uses it" if "locked" in str(reason) else reason
        raise StoreError(f"session_store {path} cannot be used: {reason}.") from None


def _check_ours(connection: sqlite3.Connection) -> None:
    [application] = connection.execute("PRAGMA application_id").fetchone()
    [version] = connection.execute("PRAGMA user_version").fetchone()
    is_empty = not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if is_empty and application == 0:
        return
    if application != _APPLICATION_ID:
        raise StoreError("it is a database of another program")
    if version != _SCHEMA_VERSION:
        raise StoreError(f"its format is {version}, this release reads {_SCHEMA_VERSION}")


def _prepare(connection: sqlite3.Connection, model: str) -> None:
    """Make the tables of a new file; in any case write, so that a file that cannot be written is found now."""
    if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        for statement in _SCHEMA.strip().split("\n"):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute("INSERT INTO meta VALUES ('model', ?)", (model,))
    connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
    if connection.execute("SELECT value FROM meta WHERE name = 'model'").fetchone() != (model,):
        raise StoreError("it holds sessions of a model with another tokenizer")
