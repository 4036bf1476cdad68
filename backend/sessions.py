"""Interactive sessions: token history, turns, and the lease that a running turn has on its session. No torch.

A session's keys and values are a CachedPrefix: softly referenced, so that idle sessions cost nothing that a running
request needs. A turn works on copies: the session changes only when its sequence was accepted (`TurnLease.accept`), and
ends with exactly the tokens that were delivered (`SessionTable.settle`).
"""

import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from limpet.backend.core import CachedPrefix, RequestError, Sequence

_MAX_REMEMBERED_ENDS = 10_000


@dataclass(frozen=True)
class Turn:
    """One turn: its new messages (JSON; None: raw), the ids that answered it, where it ends in the history."""

    messages: str | None
    reply: list[int]
    end: int


@dataclass(eq=False)
class Session:
    """A conversation. `history` is all its tokens; `turns[-1].end == len(history)`."""

    id: str
    history: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    cached: CachedPrefix = field(default_factory=CachedPrefix)
    lease: "TurnLease | None" = None
    last_used: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class TurnLease:
    """The exclusive right to add a turn. `history` and `turns` are what the turn builds on (rewound and truncated)."""

    session: Session
    history: list[int]
    turns: list[Turn]
    ends_session: bool
    messages: str | None = None
    sequence: Sequence | None = None  # once accepted

    @property
    def head(self) -> list[int]:
        """The history up to and including the last raw turn."""
        raw_ends = [turn.end for turn in self.turns if turn.messages is None]
        return self.history[: raw_ends[-1]] if raw_ends else []

    @property
    def templated_turns(self) -> list[Turn]:
        """The turns after the last raw one."""
        first = max((index + 1 for index, turn in enumerate(self.turns) if turn.messages is None), default=0)
        return self.turns[first:]

    def reusable_prefix(self, prompt: list[int]) -> CachedPrefix:
        """What of the session's cache serves `prompt`: up to the first token that differs from the history."""
        num_common = _common_prefix_length(prompt, self.history)
        cached = self.session.cached
        return CachedPrefix(cached.references, min(cached.num_tokens, num_common))

    def move_turns(self, turn_ends: list[int]) -> None:
        """The prompt of a templated turn has the earlier templated turns end there; raises RequestError."""
        first = len(self.turns) - len(self.templated_turns)
        if len(turn_ends) != len(self.turns) - first:
            raise RequestError("INTERNAL", "The front end and the engine disagree on the session's turns.")
        self.turns[first:] = [replace(turn, end=end) for turn, end in zip(self.turns[first:], turn_ends, strict=True)]

    def accept(self, sequence: Sequence, messages: str | None) -> None:
        """The engine took the turn's sequence: from now on the session is its prompt, and what will be delivered."""
        self.session.turns = self.turns
        self.session.history = list(sequence.tokens)
        self.session.cached = CachedPrefix()
        self.messages = messages
        self.sequence = sequence


class SessionTable:
    """All sessions by id, least recently used first."""

    def __init__(self, *, idle_timeout_s: float) -> None:
        self._idle_timeout_s = idle_timeout_s
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        self._ends: OrderedDict[str, str] = OrderedDict()  # id -> why it is gone

    def begin(self, session_id: str, *, start: bool, end: bool, truncate_to: int | None, rewind: int) -> TurnLease:
        """Reserve a session for a turn; raises RequestError NOT_FOUND or INVALID_ARG. The caller checked `is_busy`."""
        session = self.sessions.get(session_id)
        if session is None and not start:
            reason = self._ends.get(session_id, "it was never begun, or the engine has restarted since")
            raise RequestError("NOT_FOUND", f"Session not found: {reason}; begin it with sequence_start.")
        session = session or Session(session_id)
        history, turns = ([], []) if start else _cut(session, truncate_to, rewind)
        session.lease = TurnLease(session, history, turns, ends_session=end)
        self.sessions[session_id] = session
        self.sessions.move_to_end(session_id)
        return session.lease

    def is_busy(self, session_id: str) -> bool:
        session = self.sessions.get(session_id)
        return session is not None and session.lease is not None

    def abandon(self, lease: TurnLease) -> None:
        """Give an unaccepted lease back: the session is as before; one that this turn began vanishes."""
        session = lease.session
        session.lease = None
        if not session.turns and self.sessions.get(session.id) is session:
            del self.sessions[session.id]

    def settle(self, lease: TurnLease, num_kept: int, cached: CachedPrefix) -> int:
        """End an accepted turn with `num_kept` generated tokens; returns the length of the history."""
        session, sequence = lease.session, lease.sequence
        assert sequence is not None, "only an accepted turn can be settled"
        end = sequence.num_prompt + num_kept
        session.history = sequence.tokens[:end]
        session.turns.append(Turn(lease.messages, sequence.tokens[sequence.num_prompt : end], end))
        session.cached = cached
        session.lease = None
        session.last_used = time.monotonic()
        if lease.ends_session:
            self.remove(session, "it was ended")
        return end

    def remove(self, session: Session, reason: str) -> None:
        """Forget a session, remembering why; a turn that still runs keeps its lease."""
        if self.sessions.get(session.id) is session:
            del self.sessions[session.id]
            self._ends[session.id] = reason
            if len(self._ends) > _MAX_REMEMBERED_ENDS:
                self._ends.popitem(last=False)

    def expire(self) -> list[Session]:
        """Remove the sessions that were idle too long."""
        before = time.monotonic() - self._idle_timeout_s
        expired = [s for s in self.sessions.values() if s.lease is None and s.last_used < before]
        for session in expired:
            self.remove(session, f"it was idle for more than {self._idle_timeout_s:g} s")
        return expired


def _cut(session: Session, truncate_to: int | None, rewind: int) -> tuple[list[int], list[Turn]]:
    """History and turns after truncating to a number of tokens, then dropping whole turns."""
    history, turns = session.history, list(session.turns)
    if truncate_to is not None:
        if not 0 <= truncate_to <= len(history):
            raise RequestError(
                "INVALID_ARG", f"session_tokens is {truncate_to}; the session has {len(history)} tokens (0 is allowed)."
            )
        turns = _truncate_turns(session, truncate_to)
    if not 0 <= rewind <= len(turns):
        raise RequestError("INVALID_ARG", f"session_rewind is {rewind}; the session has {len(turns)} earlier turns.")
    turns = turns[: len(turns) - rewind]
    return history[: turns[-1].end if turns else 0], turns


def _truncate_turns(session: Session, num_tokens: int) -> list[Turn]:
    kept = [turn for turn in session.turns if turn.end <= num_tokens]
    reached = kept[-1].end if kept else 0
    if reached < num_tokens:
        kept.append(_shortened(session.history, session.turns[len(kept)], num_tokens))
    return kept


def _shortened(history: list[int], turn: Turn, end: int) -> Turn:
    """The turn cut at `end`: its reply shortened, or a raw turn where the cut goes through its prompt."""
    prompt_end = turn.end - len(turn.reply)
    if end >= prompt_end and history[prompt_end : turn.end] == turn.reply:
        return Turn(turn.messages, turn.reply[: end - prompt_end], end)
    return Turn(None, [], end)


def _common_prefix_length(a: list[int], b: list[int]) -> int:
    """Number of leading tokens that are equal, by bisection: comparing slices runs at memory speed."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
