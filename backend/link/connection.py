"""The front end's side of the link: one thread owns the socket, keeps an engine running and notices its end.

Other threads open a key for each request, send messages and get the answers through the request's `deliver`. When the
engine is lost, every open key gets Failed at once and new ones are refused until the next engine has said Welcome.
"""

import itertools
import logging
import os
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from typing import NoReturn, Protocol, TypeAlias

import msgspec
import zmq

from limpet.backend.link.keeper import EngineProcess, EngineStartError, EngineWatcher
from limpet.backend.link.messages import (
    HEARTBEAT_S,
    LOST_AFTER_S,
    Abandon,
    Admin,
    AdminReply,
    BeginTurn,
    Bye,
    CancelRequested,
    Delivered,
    EndSession,
    ErrorCode,
    Failed,
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
)
from limpet.backend.link.ownership import EngineRuntime

START_DEADLINE_S = 600.0  # from the start of an engine to its Welcome
HUNG_AFTER_S = 30.0  # silence after which an engine that still lives is killed
_SEARCH_EVERY_S = 0.05
_LONG_LIFE_S = 60.0  # an engine that lived so long is restarted at once
_MAX_BACKOFF_S = 10.0
_BYE_LINGER_MS = 1000
_RESTARTING = "it is being restarted, ask again in some seconds."
_logger = logging.getLogger(__name__)

RequestEvent: TypeAlias = TurnBegun | TokenOutput | Failed | Settled | PollCancel | CancelRequested | AdminReply
RequestMessage: TypeAlias = BeginTurn | Submit | Abandon | Settle | StillRunning | EndSession | Admin


class EngineUnavailableError(Exception):
    """There is no engine at the moment; one sentence says why."""


class Receiver(Protocol):
    """A request that waits for answers; `deliver` is called on the link's thread and must not block."""

    def deliver(self, event: RequestEvent) -> None: ...


class _EngineLostError(Exception):
    """The engine ended or fell silent; the text begins the reason given to its requests."""


class EngineConnection:
    """A front end's link to its engine, across restarts of the engine."""

    def __init__(self, runtime: EngineRuntime, keeper: EngineWatcher, hello: Hello) -> None:
        self._runtime = runtime
        self._keeper = keeper
        self._hello = hello
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToFrontEnd).decode
        self._lock = threading.Lock()
        self._keys = itertools.count(1)
        self._receivers: dict[int, Receiver] = {}
        self._outbox: deque[bytes] = deque()
        self._watermarks: dict[int, int] = {}
        self._errors: Counter[ErrorCode] = Counter()  # answered since the last heartbeat
        self._info: ModelInfo | None = None
        self._down_reason = "The engine is starting."
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self._decided = threading.Event()  # the first engine said Welcome, or could not be started
        self._start_error: EngineStartError | None = None
        self._silent_engine: tuple[int, float] | None = None  # pid of an engine that fell silent, when it last spoke
        self._failures = 0  # engines that did not live long, in a row
        self._thread = threading.Thread(target=self._run, name="limpet-link", daemon=True)

    def start(self) -> None:
        """Begin to find or start the engine."""
        self._thread.start()

    def wait_ready(self, timeout_s: float = START_DEADLINE_S) -> ModelInfo:
        """Block until the first engine is ready; raises EngineStartError with the reason if it does not get so far."""
        if not self._decided.wait(timeout_s):
            raise EngineStartError(f"The engine was not ready within {timeout_s:g} s.")
        if self._start_error is not None:
            raise self._start_error
        return self.info

    @property
    def info(self) -> ModelInfo:
        """What the running engine said of itself; raises EngineUnavailableError."""
        info = self._info
        if info is None:
            raise EngineUnavailableError(self._down_reason)
        return info

    def open(self, receiver: Receiver) -> int:
        """A new key whose answers go to `receiver` until it is closed; raises EngineUnavailableError."""
        with self._lock:
            if self._info is None:
                raise EngineUnavailableError(self._down_reason)
            key = next(self._keys)
            self._receivers[key] = receiver
            return key

    def send(self, message: RequestMessage) -> None:
        """Queue a message of an open key; silent if the key's engine has been lost meanwhile."""
        encoded = self._encode(message)
        with self._lock:
            if message.key not in self._receivers:
                return
            self._outbox.append(encoded)
        os.eventfd_write(self._wake, 1)

    def delivered(self, key: int, count: int) -> None:
        """Note a turn's watermark; sent with the next step's messages."""
        with self._lock:
            if key in self._receivers:
                self._watermarks[key] = count

    def count_error(self, code: ErrorCode) -> None:
        """Note an error that a client got; told to the engine, which counts for all, with the next heartbeat."""
        with self._lock:
            self._errors[code] += 1

    def close(self, key: int) -> None:
        """No more answers for this key, and none are expected."""
        with self._lock:
            self._receivers.pop(key, None)
            self._watermarks.pop(key, None)

    def stop(self) -> None:
        """Say Bye, end the thread and, if no engine is left to do it, remove the runtime folder."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        if not self._runtime.is_locked():
            self._runtime.remove()

    # ---- the link's thread

    def _run(self) -> None:
        context = zmq.Context()
        try:
            while not self._stopping:
                self._live_with_one_engine(context)
        finally:
            self._lose("The server is unloading the model.")
            self._decided.set()
            context.term()

    def _live_with_one_engine(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """From the search for an engine to its end."""
        try:
            engine = self._search()
            if engine is not None:
                self._serve(context, engine)
        except EngineStartError as error:
            _logger.error("%s", error)
            if not self._decided.is_set():
                self._start_error = error
                self._stopping = True
            self._give_up_for_now("The engine does not start")
        except Exception:
            _logger.exception("The link to the engine failed.")
            self._give_up_for_now("The link to the engine failed")

    def _search(self) -> EngineProcess | None:
        while not self._stopping:
            engine = self._keeper.find()
            if engine is not None:
                return engine
            self._pause(_SEARCH_EVERY_S)
        return None

    def _serve(self, context: "zmq.Context[zmq.Socket[bytes]]", engine: EngineProcess) -> None:
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.LINGER, _BYE_LINGER_MS)
        socket.connect(self._runtime.address)
        started = time.monotonic()
        try:
            self._talk(socket, engine)
        except _EngineLostError as lost:
            socket.close(linger=0)
            if time.monotonic() - started > _LONG_LIFE_S:
                self._failures = 0
            self._give_up_for_now(str(lost))
        finally:
            socket.close()
            engine.close()

    def _talk(self, socket: "zmq.Socket[bytes]", engine: EngineProcess) -> None:
        """Exchange messages until told to stop; raises _EngineLostError."""
        poller = zmq.Poller()
        for source in (socket, self._wake, engine.pidfd):
            poller.register(source, zmq.POLLIN)
        socket.send(self._encode(self._hello))
        last_heard = connected = time.monotonic()
        next_ping = 0.0
        while True:
            ready = dict(poller.poll(max(0, int((next_ping - time.monotonic()) * 1000))))
            if socket in ready:
                self._receive(socket)
                last_heard = time.monotonic()
            if self._wake in ready and self._take_wake():
                socket.send(self._encode(Bye()))
                return
            if engine.pidfd in ready:
                self._notice_end(engine)
            self._check_silence(engine, connected, last_heard)
            self._flush(socket)
            if time.monotonic() >= next_ping:
                socket.send(self._encode(Ping(self._take_errors())))
                next_ping = time.monotonic() + HEARTBEAT_S

    def _take_errors(self) -> dict[ErrorCode, int]:
        with self._lock:
            errors, self._errors = self._errors, Counter()
        return dict(errors)

    def _notice_end(self, engine: EngineProcess) -> NoReturn:
        how = self._keeper.reap(engine.pid)
        if self._info is None and how is not None and self._silent_engine is None:
            raise EngineStartError(f"The engine ended with {how} while it started; the log says why.")
        _logger.error("The engine, process %d, ended: %s.", engine.pid, how or "another front end had started it")
        raise _EngineLostError("The engine stopped")

    def _receive(self, socket: "zmq.Socket[bytes]") -> None:
        with suppress(zmq.Again):
            while True:
                self._dispatch(self._decode(socket.recv(zmq.NOBLOCK)))

    def _dispatch(self, message: Message) -> None:
        match message:
            case Outputs(items=items):
                for item in items:
                    self._deliver(item)
            case Welcome(info=info):
                self._silent_engine = None
                self._info = info
                self._decided.set()
            case TurnBegun() | Failed() | Settled() | PollCancel() | CancelRequested() | AdminReply():
                self._deliver(message)

    def _deliver(self, event: RequestEvent) -> None:
        receiver = self._receivers.get(event.key)
        if receiver is not None:
            receiver.deliver(event)

    def _check_silence(self, engine: EngineProcess, connected: float, last_heard: float) -> None:
        """An engine that spoke once and falls silent is lost to its requests; one that stays so is killed."""
        now = time.monotonic()
        if self._info is not None:
            if now - last_heard > LOST_AFTER_S:
                self._silent_engine = (engine.pid, last_heard)
                raise _EngineLostError(f"The engine has been silent for {LOST_AFTER_S:.0f} s")
            return
        deadline = connected + START_DEADLINE_S
        if self._silent_engine is not None and self._silent_engine[0] == engine.pid:
            deadline = self._silent_engine[1] + HUNG_AFTER_S
        if now > deadline:
            self._keeper.end(engine)
            self._silent_engine = None
            raise _EngineLostError("The engine hung and was stopped")

    def _flush(self, socket: "zmq.Socket[bytes]") -> None:
        if self._info is None:
            return
        with self._lock:
            messages, self._outbox = self._outbox, deque()
            watermarks, self._watermarks = self._watermarks, {}
        if watermarks:
            messages.appendleft(self._encode(Delivered(keys=list(watermarks), counts=list(watermarks.values()))))
        for message in messages:
            socket.send(message)

    def _lose(self, reason: str) -> None:
        """Fail every open key and refuse new ones."""
        with self._lock:
            self._info = None
            self._down_reason = reason
            lost, self._receivers = self._receivers, {}
            self._outbox.clear()
            self._watermarks.clear()
        for key, receiver in lost.items():
            receiver.deliver(Failed(key=key, code="UNAVAILABLE", message=reason))

    def _give_up_for_now(self, reason: str) -> None:
        """Fail the requests; before the next engine wait the longer, the more have failed in a row."""
        self._lose(f"{reason}; {_RESTARTING}")
        if self._failures > 0:
            self._pause(min(_MAX_BACKOFF_S, 2.0 ** (self._failures - 2)))
        self._failures += 1

    def _pause(self, seconds: float) -> None:
        """Wait, unless told to stop."""
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if not self._stopping and poller.poll(int(seconds * 1000)):
            self._take_wake()

    def _take_wake(self) -> bool:
        """Clear the wake-up; whether it was to stop."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        return self._stopping
