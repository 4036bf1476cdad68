"""Model-based test of engine, sessions and scheduler: any sequence of events, against a reference that keeps only text.

The reference holds each session's history as a plain list and recomputes every answer from it. The machine plays the
front ends: it sends link messages to an EngineService, steps the engine and checks every id that comes back.
"""

import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from limpet.backend.core import RequestError
from limpet.backend.engine import Engine
from limpet.backend.link.messages import (
    Abandon,
    BeginTurn,
    CancelRequested,
    Delivered,
    EndSession,
    Failed,
    Hello,
    Message,
    Outputs,
    PollCancel,
    Settle,
    Settled,
    StillRunning,
    Submit,
    TurnBegun,
    pack_ids,
    unpack_ids,
)
from limpet.backend.link.router import Connection
from limpet.backend.sampling_params import SamplingParams
from limpet.backend.service import EngineService
from limpet.backend.session_store import SessionStore, StoreError
from limpet.backend.sessions import SessionTable
from tests.engine.session_model import (
    KEPT,
    ModelRequest,
    ModelSession,
    ModelTurn,
    altered,
    cut_history,
    without_oldest,
)

IDLE_TIMEOUT_S = 1000.0
MAX_STEPS_TO_END = 2000
SESSION_IDS = ("ada", "bob", "cy", "dee")
MAX_SESSIONS = 3
SELDOM = st.sampled_from([False] * 7 + [True])  # of rules after which little is left in the caches


@dataclass
class Totals:
    """What happened in all runs of a machine."""

    num_rules: int = 0
    num_evictions: int = 0
    num_preemptions: int = 0


class SessionMachine(RuleBasedStateMachine):
    """Subclasses give `build_engine`, `next_id` and `totals`."""

    totals: ClassVar[Totals]

    vocab_size = 50
    max_new = 12
    loses_nothing = False  # sessions keep all that is cached of them, whatever is evicted

    def build_engine(self) -> Engine:
        raise AssertionError("a subclass builds the engine")

    def next_id(self, tokens: list[int]) -> int:
        raise AssertionError("a subclass computes the reference")

    # ---- set-up

    @initialize()
    def start(self) -> None:
        self.totals.num_rules -= 1  # the invariant holds after this one too
        self.expected: dict[tuple[int, ...], int] = {}
        self.next_key = 1
        self.replies: list[tuple[Connection, Message]] = []
        self.sessions: dict[str, ModelSession] = {}
        self.requests: list[ModelRequest] = []
        self.connections = [self._new_connection(0), self._new_connection(1)]
        self.folder = tempfile.TemporaryDirectory(prefix="limpet-machine-")
        self._new_service(Path(self.folder.name) / "0")

    def _new_service(self, path: Path) -> None:
        self.path = path
        self.committed = threading.Event()
        self.store = SessionStore(path, "model", self.committed.set)
        self.engine = self.build_engine()
        table = SessionTable(idle_timeout_s=IDLE_TIMEOUT_S, max_sessions=MAX_SESSIONS, store=self.store)
        self.service = EngineService(self.engine, table, frozenset(), self._send)

    def _close(self) -> None:
        self.totals.num_evictions += self.engine.cache.num_evicted
        self.totals.num_preemptions += self.engine.scheduler.num_preemptions
        self.engine.close()
        self.store.close()

    def _await_stored(self) -> None:
        """Return once all that happened is committed and the replies that waited for it are sent."""
        outcomes: list[StoreError | None] = []
        self.store.when_stored(outcomes.append)
        while not outcomes:
            assert self.committed.wait(60)
            self.committed.clear()
            self.store.run_callbacks()
        assert outcomes == [None]

    def _new_connection(self, index: int) -> Connection:
        identity = f"{index}-{self.next_key}".encode()
        self.next_key += 1
        return Connection(identity, Hello(front_end=str(index), pid=0, role="front_end"), None)

    def _send(self, connection: Connection, message: Message) -> None:
        self.replies.append((connection, message))

    # ---- requests

    @rule(
        connection=st.integers(0, 1),
        session_id=st.sampled_from(SESSION_IDS),
        start=st.booleans(),
        end=st.sampled_from([False, False, False, True]),
        new=st.lists(st.integers(0, 49), min_size=1, max_size=9),
        max_tokens=st.integers(1, 12),
        rewind=st.sampled_from([0, 0, 0, 1, 2]),
        cut=st.sampled_from([0, 0, 0, 1, 3]),
        raw=st.sampled_from([False, False, True]),
        alter=st.sampled_from([False, False, True]),
        drop=st.sampled_from([0, 0, 0, 1, 2]),
        client_gone=st.booleans(),
    )
    def turn(
        self,
        connection: int,
        session_id: str,
        start: bool,
        end: bool,
        new: list[int],
        max_tokens: int,
        rewind: int,
        cut: int,
        raw: bool,
        alter: bool,
        drop: int,
        client_gone: bool,
    ) -> None:
        """A turn on any session in any state, with all that may come along."""
        session = self.sessions.get(session_id)
        truncate_to = len(session.history) - cut if cut and session and len(session.history) >= cut else None
        key = self._key()
        begin = BeginTurn(key, session_id, start, end, truncate_to, rewind)
        owner = self._running_on(session_id)
        self.service.handle(self.connections[connection], begin)
        if owner is not None:
            self._expect(owner.connection, PollCancel)
            if not client_gone:
                self.service.handle(owner.connection, StillRunning(owner.key))
                assert self._expect(self.connections[connection], Failed).code == "UNAVAILABLE"
                return
            self._settle(owner, len(owner.received), take_reply=False)
            self._take(Settled, owner)
            session = self.sessions.get(session_id)
        if session is None and not start:
            assert self._expect(self.connections[connection], Failed).code == "NOT_FOUND"
            return
        if session is None and len(self.sessions) == MAX_SESSIONS:
            assert self._expect(self.connections[connection], Failed).code == "UNAVAILABLE"
            return
        self._after_begin(session, begin, connection, new, max_tokens, raw, alter, drop)

    def _after_begin(
        self,
        session: ModelSession | None,
        begin: BeginTurn,
        connection: int,
        new: list[int],
        max_tokens: int,
        raw: bool,
        alter: bool,
        drop: int,
    ) -> None:
        base = ModelSession() if session is None or begin.start else session
        truncate_to, rewind = (None, 0) if begin.start else (begin.truncate_to, begin.rewind)
        history, turns = (base.history, base.turns) if truncate_to is None else cut_history(base, truncate_to)
        if (truncate_to is not None and truncate_to > len(base.history)) or rewind > len(turns):
            assert self._expect(self.connections[connection], Failed).code == "INVALID_ARG"
            return
        turns = list(turns[: len(turns) - rewind])
        history = history[: turns[-1].end if turns else 0]
        begun = self._expect(self.connections[connection], TurnBegun)
        assert begun.history_len == len(history)
        head_end = max((turn.end for turn in turns if turn.messages is None), default=0)
        assert unpack_ids(begun.head) == history[:head_end]
        templated = [turn for turn in turns if turn.end > head_end]
        assert [(v.messages, unpack_ids(v.reply)) for v in begun.turns] == [(t.messages, t.reply) for t in templated]
        num_dropped = 0 if raw else min(drop, len(templated))
        is_plain = not (alter and templated and not raw) and rewind == 0 and truncate_to is None and not num_dropped
        prompt, turns = altered(history, turns, head_end) if alter and not raw else (history, turns)
        prompt, turns = without_oldest(prompt, turns, head_end, num_dropped)
        request = ModelRequest(
            self.connections[connection],
            begin.key,
            prompt + new,
            max_tokens,
            begin.session_id,
            None if raw else "[]",
            begin.end,
            turns,
            len(history) - 1 if is_plain and history else None,
            base.evictions_at_settle,
        )
        turn_ends = [] if raw else [t.end for t in turns if t.end > head_end]
        self._submit(request, turn_ends, num_dropped, KEPT if num_dropped and turn_ends else None)

    @rule(
        session_id=st.sampled_from(SESSION_IDS),
        new=st.lists(st.integers(0, 49), min_size=1, max_size=16),
        max_tokens=st.integers(1, 12),
    )
    def whole_turn(self, session_id: str, new: list[int], max_tokens: int) -> None:
        """A turn from its beginning to its end, so that memory fills up."""
        if self._running_on(session_id) is not None or not self._has_room_for(session_id):
            return
        session = self.sessions.get(session_id, ModelSession())
        starts = session_id not in self.sessions or len(session.history) + len(new) >= self.engine.session_len
        self.turn(0, session_id, starts, False, new, max_tokens, 0, 0, True, False, 0, False)
        request = self._running_on(session_id)
        assert request is not None
        for _ in range(MAX_STEPS_TO_END):
            if request.finish_reason is not None:
                break
            self.step(1)
        self._settle(request, len(request.received))

    @rule(
        connection=st.integers(0, 1), prompt=st.lists(st.integers(0, 5), min_size=1, max_size=20), n=st.integers(1, 40)
    )
    def stateless(self, connection: int, prompt: list[int], n: int) -> None:
        self._submit(ModelRequest(self.connections[connection], self._key(), prompt, n), turn_ends=[])

    @rule(session_id=st.sampled_from(SESSION_IDS), connection=st.integers(0, 1))
    def begin_and_abandon(self, session_id: str, connection: int) -> None:
        """A prompt that cannot be built gives the session back as it was."""
        if self._running_on(session_id) is not None or not self._has_room_for(session_id):
            return
        key = self._key()
        self.service.handle(self.connections[connection], BeginTurn(key, session_id, True, False))
        self._expect(self.connections[connection], TurnBegun)
        self.service.handle(self.connections[connection], Abandon(key))

    @rule(session_id=st.sampled_from(SESSION_IDS), new_id=st.sampled_from(SESSION_IDS))
    def fork(self, session_id: str, new_id: str) -> None:
        """Two sessions go on from the same past, and each keeps its cached tokens."""
        source = self.sessions.get(session_id)
        is_refused = source is None or self._running_on(session_id) is not None
        if is_refused or new_id in self.sessions or len(self.sessions) == MAX_SESSIONS:
            with pytest.raises(RequestError):
                self.service.fork_session(session_id, new_id)
            return
        self.service.fork_session(session_id, new_id)
        self.sessions[new_id] = ModelSession(source.history, list(source.turns), source.evictions_at_settle)
        self.sessions[new_id].store()

    # ---- time passes

    @rule(count=st.integers(1, 40))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.service.deliver(self.engine.step())
            self._receive()
            self.service.check_integrity()

    @precondition(lambda self: any(r.received for r in self.requests))
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from([r for r in self.requests if r.received]))
        request.delivered = data.draw(st.integers(request.delivered, len(request.received)))
        self.service.handle(request.connection, Delivered([request.key], [request.delivered]))

    # ---- ends

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data())
    def settle_at(self, data: st.DataObject) -> None:
        """A stop string, a cancel at k, or the natural end of a turn."""
        request = data.draw(st.sampled_from(self.requests))
        keep = data.draw(st.integers(0, len(request.received)))
        self._settle(request, keep if request.finish_reason is None else len(request.received))

    @rule(happens=SELDOM, session_id=st.sampled_from(SESSION_IDS), connection=st.integers(0, 1))
    def end_session(self, happens: bool, session_id: str, connection: int) -> None:
        if not happens:
            return
        owner = self._running_on(session_id)
        self.service.handle(self.connections[connection], EndSession(self._key(), session_id))
        if owner is not None:
            self._expect(owner.connection, CancelRequested)
        self._await_stored()
        self._expect(self.connections[connection], Settled)
        self.sessions.pop(session_id, None)
        if owner is not None:
            owner.freed = True
            self._settle(owner, len(owner.received))

    @rule(happens=SELDOM, session_id=st.sampled_from(SESSION_IDS))
    def expire(self, happens: bool, session_id: str) -> None:
        """A session that was idle too long goes; one whose turn runs stays."""
        session = self.service.sessions.sessions.get(session_id)
        if session is None or not happens:
            return
        session.last_used -= 2 * IDLE_TIMEOUT_S
        self.service.sessions.sessions.move_to_end(session_id, last=False)
        self.service.expire()
        if self._running_on(session_id) is None:
            del self.sessions[session_id]
        else:
            assert session_id in self.service.sessions.sessions

    @rule(happens=SELDOM, index=st.integers(0, 1))
    def lose_front_end(self, happens: bool, index: int) -> None:
        """What a lost front end had acknowledged stays, nothing else."""
        if not happens:
            return
        connection = self.connections[index]
        self.service.lose(connection)
        for request in [r for r in self.requests if r.connection is connection]:
            self._settled(request, request.delivered)
        self.connections[index] = self._new_connection(index)

    @rule(happens=SELDOM, is_killed=st.booleans())
    def restart_engine(self, happens: bool, is_killed: bool) -> None:
        """Sessions are as at their last end of a turn; a killed engine leaves the files as they lie there."""
        if not happens:
            return
        path = self.path
        if is_killed:
            path = path.with_name(str(int(path.name) + 1))
            for end in ("", "-wal"):
                if (source := Path(f"{self.path}{end}")).exists():
                    shutil.copy(source, f"{path}{end}")
        self._close()
        self.sessions = {
            session_id: ModelSession(*session.stored, is_stored=True, stored=session.stored)
            for session_id, session in self.sessions.items()
            if session.is_stored
        }
        self.requests.clear()
        self.replies.clear()
        self._new_service(path)
        assert self.service.sessions.sessions.keys() == self.sessions.keys()

    @invariant()
    def accounts_balance(self) -> None:
        self.totals.num_rules += 1
        self._check_accounts()

    def _check_accounts(self) -> None:
        self._await_stored()
        self.service.check_integrity()
        for session_id, session in self.sessions.items():
            if self._running_on(session_id) is None:
                assert list(self.service.sessions.sessions[session_id].history.tokens) == session.history

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(MAX_STEPS_TO_END):
            if not self.engine.has_work:
                break
            self.step(1)
        assert not self.engine.has_work, "requests do not end"
        for request in list(self.requests):
            self._settle(request, len(request.received))
        self._check_accounts()
        pool = self.engine.cache.pool
        assert pool.num_free == pool.num_blocks, "blocks are lost"
        self._close()
        self.folder.cleanup()

    # ---- the machine's own bookkeeping

    def _key(self) -> int:
        self.next_key += 1
        return self.next_key

    def _submit(
        self, request: ModelRequest, turn_ends: list[int], num_dropped: int = 0, first_messages: str | None = None
    ) -> None:
        message = Submit(
            request.key,
            "",
            pack_ids(request.prompt),
            SamplingParams(temperature=0, max_tokens=request.max_tokens),
            messages=request.messages,
            turn_ends=turn_ends,
            num_dropped_turns=num_dropped,
            first_messages=first_messages,
        )
        self.service.handle(request.connection, message)
        if len(request.prompt) >= self.engine.session_len:
            assert self._expect(request.connection, Failed).code == "INVALID_ARG"
            return
        self.requests.append(request)
        request.num_preemptions = self.engine.scheduler.num_preemptions
        if request.session_id is not None:
            session = self.sessions.setdefault(request.session_id, ModelSession())
            session.history, session.turns = list(request.prompt), list(request.turns)

    def _receive(self) -> None:
        """Check every id that arrived."""
        arrived, self.replies = self.replies, []
        for connection, message in arrived:
            assert isinstance(message, Outputs), f"unexpected {message}"
            for item in message.items:
                request = next(r for r in self.requests if r.connection is connection and r.key == item.key)
                self._check_output(request, item.ids, item.num_cached_tokens)
                request.finish_reason = item.finish_reason
                request.evictions_at_end = self.engine.cache.num_evicted if item.finish_reason is not None else None
                if item.finish_reason is not None and request.session_id is None:
                    self.requests.remove(request)

    def _check_output(self, request: ModelRequest, ids: list[int], num_cached: int) -> None:
        assert request.finish_reason is None, "an output after the end"
        for token in ids:
            context = request.prompt + request.received
            assert token == self._expected_id(context), f"wrong id after {context}"
            request.received.append(token)
        assert len(request.received) <= request.max_tokens
        assert len(request.prompt) + len(request.received) <= self.engine.session_len
        is_whole = request.num_evictions == self.engine.cache.num_evicted
        if request.exact_cached is not None and (is_whole or (self.loses_nothing and request.num_evictions >= 0)):
            assert num_cached >= request.exact_cached, "an idle session lost cached tokens without an eviction"
        assert num_cached < len(request.prompt)

    def _expected_id(self, context: list[int]) -> int:
        key = tuple(context)
        if key not in self.expected:
            self.expected[key] = self.next_id(context)
        return self.expected[key]

    def _settle(self, request: ModelRequest, keep: int, *, take_reply: bool = True) -> None:
        self.service.handle(request.connection, Settle(request.key, keep))
        self._await_stored()
        self._settled(request, keep)
        if request.session_id is not None and take_reply:
            self._take(Settled, request)

    def _settled(self, request: ModelRequest, keep: int) -> None:
        self.requests.remove(request)
        if request.session_id is None or request.freed:
            return
        reply = request.received[:keep]
        session = self.sessions[request.session_id]
        session.history = request.prompt + reply
        session.turns = [*request.turns, ModelTurn(request.messages, reply, len(session.history))]
        # Else the turn ended before its prompt was computed, or perhaps preempted before all was computed again.
        is_undisturbed = self.loses_nothing or request.num_preemptions == self.engine.scheduler.num_preemptions
        was_computed = bool(request.received) and is_undisturbed
        evictions = self.engine.cache.num_evicted if request.evictions_at_end is None else request.evictions_at_end
        session.evictions_at_settle = evictions if was_computed else -1
        session.store()
        if request.ends_session:
            del self.sessions[request.session_id]

    def _has_room_for(self, session_id: str) -> bool:
        return session_id in self.sessions or len(self.sessions) < MAX_SESSIONS

    def _running_on(self, session_id: str) -> ModelRequest | None:
        return next((r for r in self.requests if r.session_id == session_id and not r.freed), None)

    def _expect(self, connection: Connection, kind: type[Message]) -> Message:
        """The first reply to `connection` of that kind; nothing else may stand before it."""
        assert self.replies, f"no {kind.__name__} came"
        to, message = self.replies.pop(0)
        assert to is connection, f"{message} went to another front end"
        assert isinstance(message, kind), f"expected {kind.__name__}, got {message}"
        return message

    def _take(self, kind: type[Message], request: ModelRequest) -> None:
        for reply in self.replies:
            if reply[0] is request.connection and isinstance(reply[1], kind) and reply[1].key == request.key:
                self.replies.remove(reply)
                return
        raise AssertionError(f"no {kind.__name__} came for request {request.key}")
