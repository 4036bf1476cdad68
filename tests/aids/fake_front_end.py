"""A front end without Triton: drives an engine process over its link, step by step from a test.

A thread of its own carries the messages, so that heartbeats go on while the test computes. It answers PollCancel by
itself: StillRunning, or Settle for the requests that the test named in `gone_clients`.
"""

import itertools
import json
import os
import queue
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, TypeVar

import msgspec
import zmq

from limpet.backend.link.messages import (
    HEARTBEAT_S,
    Abandon,
    Admin,
    AdminReply,
    BeginTurn,
    Bye,
    Delivered,
    EndSession,
    ErrorCode,
    Failed,
    FinishReason,
    Hello,
    Message,
    ModelInfo,
    Outputs,
    Ping,
    PollCancel,
    Settle,
    Settled,
    StillRunning,
    Submit,
    ToFrontEnd,
    TokenOutput,
    TurnBegun,
    Welcome,
    pack_ids,
    unpack_ids,
)
from limpet.backend.sampling_params import SamplingParams

_M = TypeVar("_M", bound=Message)
_STOP = b""


class Refused(Exception):
    """The engine refused a request or failed it; `code` is the link's error code."""

    def __init__(self, code: ErrorCode | None, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


@dataclass
class Answer:
    """The outputs of one request so far, joined."""

    ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    num_outputs: int = 0


class FakeFrontEnd:
    """A connection to the engine at `address` for one thread; every wait is bounded by `timeout_s`."""

    def __init__(
        self, address: str, *, role: Literal["front_end", "admin"] = "front_end", timeout_s: float = 60.0
    ) -> None:
        self.gone_clients: dict[int, int] = {}  # key -> tokens delivered before the client left
        self.timeout_s = timeout_s
        self._keys = itertools.count(1)
        self._arrived: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._replies: list[Message] = []
        self._outputs: defaultdict[int, deque[TokenOutput]] = defaultdict(deque)
        self._silent = threading.Event()
        self._context = zmq.Context()
        self._outbox = self._context.socket(zmq.PAIR)
        self._outbox.bind("inproc://outbox")
        self._carrier = threading.Thread(target=self._carry, args=(address,), name="fake-front-end", daemon=True)
        self._carrier.start()
        self.send(Hello(front_end="fake", pid=os.getpid(), role=role))
        self.info: ModelInfo = self._take(Welcome).info

    def __enter__(self) -> "FakeFrontEnd":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def send(self, message: Message) -> None:
        self._outbox.send(msgspec.msgpack.encode(message))

    def submit(self, prompt: list[int], params: SamplingParams, *, key: int | None = None, **fields: Any) -> int:
        """Start a stateless request, or with the `key` of a begun turn its generation; returns the key."""
        key = next(self._keys) if key is None else key
        self.send(Submit(key=key, request_id=f"request-{key}", prompt=pack_ids(prompt), params=params, **fields))
        return key

    def collect(self, key: int, *, at_least: int | None = None) -> Answer:
        """Wait for the end of a request, or for `at_least` new tokens; raises Refused if it fails."""
        answer = Answer()
        while answer.finish_reason is None and (at_least is None or len(answer.ids) < at_least):
            self._join(answer, self._next_output(key))
        return answer

    def generate(self, prompt: list[int], params: SamplingParams) -> Answer:
        """A stateless request from its prompt to its end."""
        return self.collect(self.submit(prompt, params))

    def begin_turn(
        self,
        session_id: str,
        *,
        start: bool = False,
        end: bool = False,
        truncate_to: int | None = None,
        rewind: int = 0,
    ) -> TurnBegun:
        """Reserve the session; raises Refused with the link's code."""
        key = next(self._keys)
        self.send(BeginTurn(key, session_id, start, end, truncate_to, rewind))
        return self._take(TurnBegun, key)

    def abandon(self, turn: TurnBegun) -> None:
        self.send(Abandon(turn.key))

    def deliver(self, key: int, count: int) -> None:
        self.send(Delivered([key], [count]))

    def settle(self, key: int, keep: int, *, cancelled: bool = False) -> int:
        """End a turn with `keep` generated tokens; returns the length of the session's history."""
        self.send(Settle(key, keep, cancelled))
        return self._take(Settled, key).session_tokens

    def ask(self, session_id: str, new_ids: list[int], params: SamplingParams, *, start: bool = False) -> Answer:
        """A whole raw turn: the history with `new_ids` after it is answered, and all of the answer is kept."""
        turn = self.begin_turn(session_id, start=start)
        prompt = [*history_ids(turn), *new_ids]
        answer = self.collect(self.submit(prompt, params, key=turn.key, turn_ends=[]))
        self.settle(turn.key, len(answer.ids))
        return answer

    def end_session(self, session_id: str) -> None:
        key = next(self._keys)
        self.send(EndSession(key, session_id))
        self._take(Settled, key)

    def admin(self, op: str, **arguments: Any) -> Any:
        """The result of an operation of limpet_admin."""
        key = next(self._keys)
        self.send(Admin(key, op, json.dumps(arguments)))
        return json.loads(self._take(AdminReply, key).result)

    def wait_for(self, kind: type[_M], key: int) -> _M:
        """Wait for a message that the engine sends by itself, such as CancelRequested."""
        return self._take(kind, key)

    def fall_silent(self) -> None:
        """Hang: no heartbeats and no answers to PollCancel any more."""
        self._silent.set()

    def close(self) -> None:
        """Leave on purpose."""
        self.send(Bye())
        self.drop()

    def drop(self) -> None:
        """Leave without a word."""
        self._outbox.send(_STOP)
        self._carrier.join(self.timeout_s)
        self._outbox.close(linger=0)
        self._context.term()

    def _join(self, answer: Answer, output: TokenOutput) -> None:
        if output.error_code is not None:
            raise Refused(output.error_code, output.error)
        answer.ids += output.ids
        answer.finish_reason = output.finish_reason
        answer.num_cached_tokens = output.num_cached_tokens
        answer.num_outputs += 1

    def _next_output(self, key: int) -> TokenOutput:
        deadline = time.monotonic() + self.timeout_s
        while not self._outputs[key]:
            self._raise_if_failed(key)
            self._receive(deadline, f"output of request {key}")
        return self._outputs[key].popleft()

    def _take(self, kind: type[_M], key: int | None = None) -> _M:
        deadline = time.monotonic() + self.timeout_s
        while True:
            for reply in self._replies:
                if isinstance(reply, kind) and (key is None or getattr(reply, "key", None) == key):
                    self._replies.remove(reply)
                    return reply
            if key is not None:
                self._raise_if_failed(key)
            self._receive(deadline, kind.__name__)

    def _raise_if_failed(self, key: int) -> None:
        for reply in self._replies:
            if isinstance(reply, Failed) and reply.key == key:
                self._replies.remove(reply)
                raise Refused(reply.code, reply.message)

    def _receive(self, deadline: float, wanted: str) -> None:
        try:
            message = self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError(f"No {wanted} from the engine within {self.timeout_s} s.") from None
        if not isinstance(message, Outputs):
            self._replies.append(message)
            return
        for output in message.items:
            self._outputs[output.key].append(output)

    def _carry(self, address: str) -> None:
        """Body of the carrier thread, until the outbox says _STOP."""
        inbox = self._context.socket(zmq.PAIR)
        inbox.connect("inproc://outbox")
        engine = self._context.socket(zmq.DEALER)
        engine.set_hwm(0)
        engine.connect(address)
        poller = zmq.Poller()
        poller.register(inbox, zmq.POLLIN)
        poller.register(engine, zmq.POLLIN)
        decoder = msgspec.msgpack.Decoder(ToFrontEnd)
        ping_at = time.monotonic() + HEARTBEAT_S
        while True:
            ready = dict(poller.poll(max(0, round((ping_at - time.monotonic()) * 1000))))
            if inbox in ready:
                message = inbox.recv()
                if message == _STOP:
                    break
                engine.send(message)
            if engine in ready:
                self._sort(decoder.decode(engine.recv()), engine)
            if time.monotonic() >= ping_at:
                ping_at += HEARTBEAT_S
                if not self._silent.is_set():
                    engine.send(msgspec.msgpack.encode(Ping()))
        inbox.close(linger=0)
        engine.close(linger=1000)

    def _sort(self, message: ToFrontEnd, engine: "zmq.Socket[bytes]") -> None:
        if isinstance(message, PollCancel):
            if self._silent.is_set():
                return
            keep = self.gone_clients.get(message.key)
            answer = StillRunning(message.key) if keep is None else Settle(message.key, keep, True)
            engine.send(msgspec.msgpack.encode(answer))
        elif not isinstance(message, Ping):
            self._arrived.put(message)


def history_ids(turn: TurnBegun) -> list[int]:
    """The ids of a session that had raw turns only."""
    assert not turn.turns, "the session has templated turns: its ids are not all in the head"
    return unpack_ids(turn.head)
