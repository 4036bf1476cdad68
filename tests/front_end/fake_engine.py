"""An engine without a model: it holds the lock, speaks the link, and does what the test tells it.

As a thread of the test it is driven by `expect` and `send`; as a process (`python -m tests.front_end.fake_engine FOLDER
DIGEST`) it welcomes front ends and answers nothing else, until it is killed.
"""

import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from limpet.backend.link.messages import (
    HEARTBEAT_S,
    Bye,
    Delivered,
    Hello,
    Message,
    ModelInfo,
    Ping,
    Settle,
    Settled,
    ToEngine,
    Welcome,
)
from limpet.backend.link.ownership import EXIT_NOT_OWNER, EngineRuntime

WAIT_S = 20.0
_T = TypeVar("_T", bound=Message)


class FakeEngine:
    """One connection at a time: `send` answers the front end that spoke last."""

    def __init__(self, runtime: EngineRuntime, digest: str, info: ModelInfo) -> None:
        assert runtime.take_lock(digest)
        self._address = runtime.address
        self.info = info
        self.is_silent = False
        self.settles_by_itself = False
        self.delivered: dict[int, int] = {}
        self.hellos: list[Hello] = []
        self._arrived: queue.Queue[Message] = queue.Queue()
        self._outgoing: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._stopping = False
        self._thread = threading.Thread(target=self.run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        os.close(self._wake)

    def expect(self, kind: type[_T]) -> _T:
        """The next message, which must be of this kind; heartbeats and watermarks aside."""
        message = self._arrived.get(timeout=WAIT_S)
        assert isinstance(message, kind), message
        return message

    def expect_nothing(self) -> None:
        """No message has come that was not asked for."""
        assert self._arrived.empty(), list(self._arrived.queue)

    def send(self, message: Message) -> None:
        self._outgoing.put(message)
        os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 0)
        socket.bind(self._address)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        decode = msgspec.msgpack.Decoder(ToEngine).decode
        encode = msgspec.msgpack.Encoder().encode
        identity, last_beat = None, 0.0
        while not self._stopping:
            ready = dict(poller.poll(int(HEARTBEAT_S * 1000)))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            while socket.poll(0):
                identity, payload = socket.recv_multipart()
                self._receive(decode(payload))
            if identity is not None and not self.is_silent and time.monotonic() - last_beat > HEARTBEAT_S:
                self._outgoing.put(Ping())
                last_beat = time.monotonic()
            while identity is not None and not self.is_silent and not self._outgoing.empty():
                socket.send_multipart([identity, encode(self._outgoing.get())])
        context.destroy()

    def _receive(self, message: Message) -> None:
        if isinstance(message, Hello):
            self.hellos.append(message)
            self._outgoing.put(Welcome(self.info))
        elif isinstance(message, Delivered):
            self.delivered.update(zip(message.keys, message.counts, strict=True))
        elif not isinstance(message, Ping):
            self._arrived.put(message)
            if isinstance(message, Settle) and self.settles_by_itself:
                self._outgoing.put(Settled(message.key, message.keep))

    def await_bye(self) -> None:
        self.expect(Bye)


def main() -> int:
    runtime, digest = EngineRuntime(Path(sys.argv[1])), sys.argv[2]
    info = ModelInfo(engine_pid=os.getpid(), session_len=64, vocab_size=100, max_batch_size=1, eos_token_ids=[])
    try:
        FakeEngine(runtime, digest, info).run()
    except AssertionError:
        return EXIT_NOT_OWNER
    return 0


if __name__ == "__main__":
    sys.exit(main())
