"""What the engine does for its front ends: requests, turns of sessions, cancellation, admin operations.

Knows messages, engine and sessions; transport is `limpet.backend.link.router`, whose `send` it is given. The busy rule:
a BeginTurn for a session with a running turn is parked while the owner of that turn polls its client; the answer is
`session busy`, or the turn itself if the client had gone. So is a fork.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from limpet.backend.core import RequestError, Sequence, SequenceOutput
from limpet.backend.engine import Engine
from limpet.backend.link.messages import (
    Abandon,
    BeginTurn,
    CancelRequested,
    Delivered,
    EndSession,
    Failed,
    Message,
    Outputs,
    Ping,
    PollCancel,
    Settle,
    Settled,
    StillRunning,
    Submit,
    TokenOutput,
    TurnBegun,
    TurnView,
    pack_ids,
    unpack_ids,
)
from limpet.backend.link.router import Connection
from limpet.backend.log import quoted
from limpet.backend.metrics import EngineMetrics
from limpet.backend.offline import new_sequence
from limpet.backend.session_store import StoreError
from limpet.backend.sessions import Session, SessionBusyError, SessionTable, TurnLease

logger = logging.getLogger(__name__)

Send = Callable[[Connection, Message], None]


@dataclass(eq=False)
class ServedRequest:
    """A request, or a turn from BeginTurn to Settle."""

    connection: Connection
    key: int
    request_id: str = ""
    lease: TurnLease | None = None
    sequence: Sequence | None = None
    num_delivered: int = 0
    accepted_at: float = field(default_factory=time.monotonic)
    last_token_at: float = field(default_factory=time.monotonic)  # at first: when the request arrived

    @property
    def is_generating(self) -> bool:
        return self.sequence is not None and not self.sequence.finished


@dataclass(frozen=True)
class Parked:
    """What waits for the end of a session's turn, or for word that its client is still there."""

    connection: Connection
    retry: Callable[[], None]
    refuse: Callable[[], None]


class EngineService:
    """Handles the messages of all connections; one thread."""

    def __init__(self, engine: Engine, sessions: SessionTable, eos_ids: frozenset[int], send: Send) -> None:
        self.engine = engine
        self.sessions = sessions
        self._eos_ids = eos_ids
        self._send = send
        self._requests: dict[tuple[bytes, int], ServedRequest] = {}
        self._parked: defaultdict[str, list[Parked]] = defaultdict(list)
        self.is_draining = False
        self.metrics = EngineMetrics()

    @property
    def requests(self) -> list[ServedRequest]:
        return list(self._requests.values())

    def handle(self, connection: Connection, message: Message) -> None:
        """Serve one message; a refusal goes to its own request only."""
        match message:
            case Submit():
                self._refusable(connection, message.key, lambda: self._submit(connection, message))
            case BeginTurn():
                self._refusable(connection, message.key, lambda: self._begin_turn(connection, message))
            case Delivered():
                self._delivered(connection, message)
            case Settle():
                self._settle(connection, message)
            case StillRunning():
                self._refuse_parked(connection, message)
            case Abandon():
                self._abandon(connection, message.key)
            case EndSession():
                self._end_session(connection, message)
            case Ping():
                self.metrics.errors.update(message.errors)

    def lose(self, connection: Connection) -> None:
        """A front end is gone: its turns end with what it had delivered, everything else is dropped."""
        for session_id, waiting in self._parked.items():
            self._parked[session_id] = [parked for parked in waiting if parked.connection is not connection]
        for request in self.requests:
            if request.connection is connection:
                self._close(request, request.num_delivered)

    def deliver(self, outputs: list[SequenceOutput]) -> None:
        """Send a step's outputs to the front ends, one message each."""
        now = time.monotonic()
        batches: defaultdict[Connection, list[TokenOutput]] = defaultdict(list)
        for output in outputs:
            request = output.sequence.key
            assert isinstance(request, ServedRequest)
            self._count(request, output, now)
            batches[request.connection].append(_token_output(request, output))
            if output.ends and request.lease is None:  # a session's turn ends with its front end's Settle
                self._close(request, output.sequence.num_generated)
        for connection, items in batches.items():
            self._send(connection, Outputs(items))

    def expire(self) -> None:
        """End requests whose deadline passed and sessions that were idle too long."""
        for sequence in self.engine.scheduler.expired():
            self.engine.stop(sequence)
            error = RequestError("CANCELLED", "The request's timeout_ms passed before its answer was complete.")
            self.deliver([SequenceOutput(sequence, [], error=error)])
        for sequence, error in self.engine.scheduler.misguided():
            self.engine.stop(sequence)
            self.deliver([SequenceOutput(sequence, [], error=error)])
        for session in self.sessions.expire():
            self._drop_cache(session)

    def cancel(self, *, request_id: str | None = None, session_id: str | None = None) -> int:
        """Stop matching requests within a step; their front ends deliver the end. Returns how many there were."""
        matching = [
            request
            for request in self.requests
            if (request_id is not None and request.request_id == request_id)
            or (session_id is not None and request.lease is not None and request.lease.session.id == session_id)
        ]
        for request in matching:
            self._cancel(request)
        return len(matching)

    def end_session(self, session_id: str) -> bool:
        """Free a session; a running turn is cancelled. False if there is none."""
        session = self.sessions.sessions.get(session_id)
        if session is None:
            return False
        self.sessions.remove(session, "it was ended")
        self._drop_cache(session)
        for request in self.requests:
            if request.lease is not None and request.lease.session is session:
                self._cancel(request)
        return True

    def fork_session(self, session_id: str, new_id: str) -> Session:
        """Begin a session as a copy of an idle one, sharing its cache; raises RequestError."""
        return self.sessions.fork(session_id, new_id)

    def park(self, session_id: str, parked: Parked) -> None:
        """Let it wait until the session's running turn ends, or its client turns out to be there."""
        self._parked[session_id].append(parked)
        owner = self._owner(session_id)
        self._send(owner.connection, PollCancel(owner.key))

    def count_blocks(self, session: Session) -> tuple[int, int]:
        """How many blocks of the device, and how many in host memory only, hold keys and values of the history."""
        sequence = session.lease.sequence if session.lease is not None else None
        if sequence is not None and sequence.row is not None:
            return len(sequence.blocks), 0
        return self.engine.cache.count_blocks(session.cached if sequence is None else sequence.cached_prefix)

    def check_integrity(self) -> None:
        """Raise AssertionError unless rows, blocks and leases are all accounted for."""
        self.engine.check_integrity()
        leases = {id(request.lease) for request in self.requests if request.lease is not None}
        for session in self.sessions.sessions.values():
            assert session.lease is None or id(session.lease) in leases, (
                f"session {session.id}: lease without a request"
            )
            tokens, turns = session.history.tokens, session.history.turns
            assert (turns[-1].end if turns else 0) == len(tokens) or session.lease is not None

    # ---- one message each

    def _refusable(self, connection: Connection, key: int, serve: Callable[[], None]) -> None:
        try:
            if self.is_draining:
                raise RequestError("UNAVAILABLE", "The server is stopping: ask another one, or again later.")
            serve()
        except RequestError as error:
            self._abandon(connection, key)
            self._send(connection, Failed(key, error.code, str(error)))

    def _begin_turn(self, connection: Connection, message: BeginTurn) -> None:
        if self.sessions.is_busy(message.session_id):
            busy = SessionBusyError(message.session_id)
            retry = partial(self.handle, connection, message)
            refuse = partial(self._send, connection, Failed(message.key, busy.code, str(busy)))
            self.park(message.session_id, Parked(connection, retry, refuse))
            return
        lease = self.sessions.begin(
            message.session_id,
            start=message.start,
            end=message.end,
            truncate_to=message.truncate_to,
            rewind=message.rewind,
        )
        self._requests[connection.identity, message.key] = ServedRequest(connection, message.key, lease=lease)
        views = [TurnView(turn.messages or "[]", pack_ids(turn.reply)) for turn in lease.templated_turns]
        self._send(connection, TurnBegun(message.key, len(lease.history.tokens), pack_ids(lease.head), views))

    def _submit(self, connection: Connection, message: Submit) -> None:
        prompt = unpack_ids(message.prompt)
        sequence = new_sequence(None, prompt, message.params, self._eos_ids, message.cache_salt)
        sequence.priority = message.priority
        if message.timeout_ms is not None:
            sequence.deadline = time.monotonic() + message.timeout_ms / 1000
        request = self._requests.get((connection.identity, message.key)) or ServedRequest(connection, message.key)
        request.request_id = message.request_id
        sequence.key = request
        lease = request.lease
        if lease is not None:
            if message.messages is not None:
                lease.drop_turns(message.num_dropped_turns, message.first_messages)
                lease.move_turns(message.turn_ends)
            sequence.cached_prefix = lease.reusable_prefix(prompt)
            sequence.is_turn = True
        self.engine.add(sequence)
        if lease is not None:
            lease.accept(sequence, message.messages)
        request.sequence = sequence
        request.last_token_at = message.arrived_at or request.last_token_at
        self._requests[connection.identity, message.key] = request
        self.metrics.num_requests += 1
        self.metrics.num_tokens_in += len(prompt)

    def _delivered(self, connection: Connection, message: Delivered) -> None:
        for key, count in zip(message.keys, message.counts, strict=True):
            request = self._requests.get((connection.identity, key))
            if request is not None:
                request.num_delivered = max(request.num_delivered, count)

    def _settle(self, connection: Connection, message: Settle) -> None:
        request = self._requests.get((connection.identity, message.key))
        if request is None:
            return
        session_tokens = self._close(request, message.keep)
        if request.lease is not None:
            self._send_when_stored(connection, Settled(message.key, session_tokens))

    def _refuse_parked(self, connection: Connection, message: StillRunning) -> None:
        request = self._requests.get((connection.identity, message.key))
        if request is None or request.lease is None:
            return
        for parked in self._parked.pop(request.lease.session.id, []):
            parked.refuse()

    def _abandon(self, connection: Connection, key: int) -> None:
        request = self._requests.get((connection.identity, key))
        if request is not None and request.sequence is None:
            self._close(request, 0)

    def _end_session(self, connection: Connection, message: EndSession) -> None:
        self.end_session(message.session_id)
        self._send_when_stored(connection, Settled(message.key, 0))

    def _send_when_stored(self, connection: Connection, settled: Settled) -> None:
        def send(error: StoreError | None) -> None:
            failed = Failed(settled.key, "UNAVAILABLE", str(error))
            self._send(connection, settled if error is None else failed)

        self.sessions.when_stored(send)

    def _count(self, request: ServedRequest, output: SequenceOutput, now: float) -> None:
        if not output.ids:
            return
        metrics, sequence = self.metrics, output.sequence
        is_first = sequence.num_generated == len(output.ids)
        (metrics.time_to_first_token if is_first else metrics.inter_token_latency).observe(now - request.last_token_at)
        metrics.num_cached_tokens += (sequence.num_cached or 0) if is_first else 0
        metrics.num_tokens_out += len(output.ids)
        request.last_token_at = now

    # ---- ends

    def _cancel(self, request: ServedRequest) -> None:
        if request.sequence is not None:
            self.engine.stop(request.sequence)
        self._send(request.connection, CancelRequested(request.key))

    def _close(self, request: ServedRequest, num_kept: int) -> int:
        """Forget a request; its turn keeps `num_kept` generated tokens. Returns the session's length."""
        self._requests.pop((request.connection.identity, request.key), None)
        sequence, lease = request.sequence, request.lease
        if sequence is not None:
            self.engine.stop(sequence)
            _log_end(request, sequence, num_kept)
        if lease is None:
            if sequence is not None:
                self.engine.discard(sequence)
            return 0
        if sequence is None:
            self.sessions.abandon(lease)
            length = len(lease.session.history.tokens)
        else:
            length = self._settle_turn(lease, sequence, min(max(num_kept, 0), sequence.num_generated))
        self._retry_parked(lease.session)
        return length

    def _settle_turn(self, lease: TurnLease, sequence: Sequence, num_kept: int) -> int:
        # The last token of a history has no keys and values: the next turn computes it in any case.
        cached = self.engine.cached(sequence, sequence.num_prompt + num_kept - 1)
        length = self.sessions.settle(lease, num_kept, cached)
        if self.sessions.sessions.get(lease.session.id) is not lease.session:
            self._drop_cache(lease.session)
        return length

    def _drop_cache(self, session: Session) -> None:
        """Nobody comes back for the session's keys and values, unless a fork does."""
        if not session.forked:
            self.engine.cache.drop(session.cached)

    def _retry_parked(self, session: Session) -> None:
        for parked in self._parked.pop(session.id, []):
            parked.retry()

    def _owner(self, session_id: str) -> ServedRequest:
        lease = self.sessions.sessions[session_id].lease
        return next(request for request in self._requests.values() if request.lease is lease)


def _log_end(request: ServedRequest, sequence: Sequence, num_kept: int) -> None:
    logger.info(
        "event=request_end request_id=%s session_id=%s tokens_in=%d tokens_cached=%d tokens_out=%d tokens_kept=%d "
        "preemptions=%d duration_s=%.3f",
        quoted(request.request_id),
        quoted(request.lease.session.id) if request.lease is not None else "",
        sequence.num_prompt,
        sequence.num_cached or 0,
        sequence.num_generated,
        num_kept,
        sequence.num_preemptions,
        time.monotonic() - request.accepted_at,
    )


def _token_output(request: ServedRequest, output: SequenceOutput) -> TokenOutput:
    return TokenOutput(
        key=request.key,
        ids=output.ids,
        finish_reason=output.finish_reason,
        num_cached_tokens=output.sequence.num_cached or 0,
        error_code=None if output.error is None else output.error.code,
        error="" if output.error is None else str(output.error),
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
    )
