"""Interactive sessions: their histories, and the lease that a running turn has on its session. No torch.

A session's keys and values are a CachedPrefix: softly referenced, so that idle sessions cost nothing that a running
request needs. A turn works on copies: the session changes only when its sequence was accepted (`TurnLease.accept`), and
ends with exactly the tokens that were delivered (`SessionTable.settle`).
"""

import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from limpet.backend.core import CachedPrefix, RequestError, Sequence
from limpet.backend.history import History, TokenArray, Turn, token_array
from limpet.backend.session_store import Callback, SessionStore, StoredSession, since_1970

_MAX_REMEMBERED_ENDS = 10_000
_MAX_ID_CHARS = 128  # Triton's own limit


class SessionBusyError(RequestError):
    """A turn of the session is running."""

    def __init__(self, session_id: str) -> None:
        super().__init__("UNAVAILABLE", "Session busy: a turn is running; cancel it or wait for its end.")
        self.session_id = session_id


def empty_history() -> History:
    return History(token_array(), [])


@dataclass(eq=False, slots=True)
class Session:
    """A conversation; `forked`: another one may hold the same soft references."""

    id: str
    history: History = field(default_factory=empty_history)
    cached: CachedPrefix = field(default_factory=CachedPrefix)
    lease: "TurnLease | None" = None
    last_used: float = field(default_factory=time.monotonic)
    forked: bool = False


@dataclass(eq=False)
class TurnLease:
    """The exclusive right to add a turn. `history` is what the turn builds on (rewound and truncated)."""

    session: Session
    history: History
    ends_session: bool
    messages: str | None = None
    sequence: Sequence | None = None  # once accepted

    @property
    def head(self) -> TokenArray:
        """The history up to and including the last raw turn."""
        raw_ends = [turn.end for turn in self.history.turns if turn.messages is None]
        return self.history.tokens[: raw_ends[-1] if raw_ends else 0]

    @property
    def templated_turns(self) -> list[Turn]:
        """The turns after the last raw one."""
        turns = self.history.turns
        first = max((index + 1 for index, turn in enumerate(turns) if turn.messages is None), default=0)
        return turns[first:]

    def reusable_prefix(self, prompt: list[int]) -> CachedPrefix:
        """What of the session's cache serves `prompt`: up to the first token that differs from the history."""
        cached = self.session.cached
        num_tokens = min(cached.num_tokens, self.history.common_prefix_length(prompt))
        return CachedPrefix(cached.references, num_tokens, is_shared=self.session.forked)

    def drop_turns(self, count: int, first_messages: str | None) -> None:
        """The first `count` templated turns leave the conversation; what follows them begins with these messages."""
        turns, templated = self.history.turns, self.templated_turns
        kept = templated[count:]
        if first_messages is not None and kept:
            kept[0] = replace(kept[0], messages=first_messages)
        turns[len(turns) - len(templated) :] = kept

    def move_turns(self, turn_ends: list[int]) -> None:
        """The prompt of a templated turn has the earlier templated turns end there; raises RequestError."""
        turns = self.history.turns
        first = len(turns) - len(self.templated_turns)
        if len(turn_ends) != len(turns) - first:
            raise RequestError("INTERNAL", "The front end and the engine disagree on the session's turns.")
        turns[first:] = [replace(turn, end=end) for turn, end in zip(turns[first:], turn_ends, strict=True)]

    def accept(self, sequence: Sequence, messages: str | None) -> None:
        """The engine took the turn's sequence: from now on the session is its prompt, and what will be delivered."""
        self.session.history = History(token_array(sequence.tokens), self.history.turns)
        self.session.cached = CachedPrefix()
        self.messages = messages
        self.sequence = sequence


class SessionTable:
    """All sessions by id, least recently used first; at most `max_sessions`. With a `store` they outlive the engine."""

    def __init__(self, *, idle_timeout_s: float, max_sessions: int, store: SessionStore | None = None) -> None:
        self._idle_timeout_s = idle_timeout_s
        self._max_sessions = max_sessions
        self._store = store
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        self._ends: OrderedDict[str, str] = OrderedDict()  # id -> why it is gone
        for stored in store.load() if store is not None else ():
            last_used = time.monotonic() - max(0.0, time.time() - stored.last_used)
            self.sessions[stored.id] = Session(stored.id, stored.history, last_used=last_used)

    def begin(self, session_id: str, *, start: bool, end: bool, truncate_to: int | None, rewind: int) -> TurnLease:
        """Reserve a session for a turn; raises RequestError. The caller checked `is_busy`."""
        if start and session_id not in self.sessions:
            self._check_room()
            session = Session(session_id)
        else:
            session = self.find(session_id)
        history = empty_history() if start else session.history.cut(truncate_to, rewind)
        session.lease = TurnLease(session, history, ends_session=end)
        self.sessions[session_id] = session
        self.sessions.move_to_end(session_id)
        return session.lease

    def find(self, session_id: str) -> Session:
        """Raises RequestError NOT_FOUND, with the reason if it is known."""
        session = self.sessions.get(session_id)
        if session is None:
            reason = self._ends.get(session_id, "it was never begun, or the engine has restarted since")
            raise RequestError("NOT_FOUND", f"Session not found: {reason}; begin it with sequence_start.")
        return session

    def is_busy(self, session_id: str) -> bool:
        session = self.sessions.get(session_id)
        return session is not None and session.lease is not None

    def abandon(self, lease: TurnLease) -> None:
        """Give an unaccepted lease back: the session is as before; one that this turn began vanishes."""
        session = lease.session
        session.lease = None
        self._touch(session)
        if not session.history.turns and self.sessions.get(session.id) is session:
            del self.sessions[session.id]

    def settle(self, lease: TurnLease, num_kept: int, cached: CachedPrefix) -> int:
        """End an accepted turn with `num_kept` generated tokens; returns the length of the history."""
        session, sequence = lease.session, lease.sequence
        assert sequence is not None, "only an accepted turn can be settled"
        end = sequence.num_prompt + num_kept
        tokens = token_array(sequence.tokens[:end])
        turn = Turn(lease.messages, tokens[sequence.num_prompt :], end)
        session.history = History(tokens, [*session.history.turns, turn])
        session.cached = cached
        session.lease = None
        self._touch(session)
        if lease.ends_session:
            self.remove(session, "it was ended")
        self._save(session)
        return end

    def fork(self, session_id: str, new_id: str) -> Session:
        """A second session with the same history and the same soft references; raises RequestError."""
        if not 0 < len(new_id) <= _MAX_ID_CHARS or new_id == "0" or "\0" in new_id:
            allowed = f"1 to {_MAX_ID_CHARS} characters, none of them NUL"
            raise RequestError("INVALID_ARG", f"A session id has {allowed}, and is not 0.")
        source = self.find(session_id)
        if source.lease is not None:
            raise SessionBusyError(session_id)
        if new_id in self.sessions:
            raise RequestError("INVALID_ARG", "There is a session with the new id already: choose another one.")
        self._check_room()
        source.forked = True
        twin = Session(new_id, source.history, source.cached, forked=True)
        self.sessions[new_id] = twin
        self._save(twin)
        return twin

    def when_stored(self, callback: Callback) -> None:
        """Call it once all changes so far would outlive this process, with the reason if they would not."""
        if self._store is None:
            callback(None)
        else:
            self._store.when_stored(callback)

    def remove(self, session: Session, reason: str) -> None:
        """Forget a session, remembering why; a turn that still runs keeps its lease."""
        if self.sessions.get(session.id) is session:
            del self.sessions[session.id]
            self._ends[session.id] = reason
            if len(self._ends) > _MAX_REMEMBERED_ENDS:
                self._ends.popitem(last=False)
            if self._store is not None:
                self._store.delete(session.id)

    def expire(self) -> list[Session]:
        """Remove the sessions that were idle too long; costs nothing while there are none."""
        before = time.monotonic() - self._idle_timeout_s
        expired = []
        for session in self.sessions.values():
            if session.lease is None:
                if session.last_used >= before:
                    break
                expired.append(session)
        for session in expired:
            self.remove(session, f"it was idle for more than {self._idle_timeout_s:g} s")
        return expired

    def _save(self, session: Session) -> None:
        if self._store is not None and self.sessions.get(session.id) is session:
            self._store.save(StoredSession(session.id, session.history, since_1970(session.last_used)))

    def _touch(self, session: Session) -> None:
        """It was used now, and is the last to expire."""
        session.last_used = time.monotonic()
        if self.sessions.get(session.id) is session:
            self.sessions.move_to_end(session.id)

    def _check_room(self) -> None:
        if len(self.sessions) >= self._max_sessions:
            raise RequestError(
                "UNAVAILABLE",
                f"The server keeps its limit of {self._max_sessions} sessions: end one, or try again later.",
            )
