"""The engine's end of the link: one ROUTER socket, who is connected, who is lost.

A front end is lost when its process ends (pidfd), says Bye, or is silent for LOST_AFTER_S.
"""

import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import zmq

from limpet.backend.link.messages import HEARTBEAT_S, LOST_AFTER_S, Bye, Hello, Message, Ping, ToEngine

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Connection:
    """One front end or admin model."""

    identity: bytes
    hello: Hello
    pidfd: int | None
    last_heard: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Arrived:
    """A message of a known connection."""

    connection: Connection
    message: Message


@dataclass(frozen=True)
class Lost:
    """A connection ended; `died` if its process is gone without a Bye."""

    connection: Connection
    died: bool


class Router:
    """Binds `address` (ipc://). `poll` is the engine process's only place to wait."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._connections: dict[bytes, Connection] = {}
        self._next_heartbeat = 0.0

    @property
    def connections(self) -> list[Connection]:
        return list(self._connections.values())

    def watch(self, fd: int) -> None:
        """Let `poll` return when `fd` becomes readable."""
        self._poller.register(fd, zmq.POLLIN)

    def wake(self) -> None:
        """Let `poll` return now; from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def send(self, connection: Connection, message: Message) -> None:
        if connection.identity in self._connections:
            self._socket.send_multipart([connection.identity, self._encoder.encode(message)])

    def poll(self, timeout_s: float) -> list[Arrived | Lost]:
        """Wait for something to happen; returns what did, plain heartbeats aside."""
        patience = min(timeout_s, max(self._next_heartbeat - time.monotonic(), 0.0))
        ready = {fd for fd, _ in self._poller.poll(math.ceil(patience * 1000))}
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        events: list[Arrived | Lost] = list(self._receive())
        events += self._lost(ready)
        self._beat()
        return events

    def close(self) -> None:
        for connection in self.connections:
            self._forget(connection)
        self._socket.close()
        self._context.term()
        os.close(self._wake_fd)

    def _receive(self) -> Iterator[Arrived | Lost]:
        while self._socket.poll(0):
            identity, payload = self._socket.recv_multipart()
            try:
                message = self._decoder.decode(payload)
            except msgspec.DecodeError as error:
                logger.error("dropped a message that does not decode: %s", error)
                continue
            if isinstance(message, Hello):
                self._connect(identity, message)
            connection = self._connections.get(identity)
            if connection is None:  # it was lost meanwhile
                continue
            connection.last_heard = time.monotonic()
            if isinstance(message, Bye):
                self._forget(connection)
                yield Lost(connection, died=False)
            elif not isinstance(message, Ping) or message.errors:
                yield Arrived(connection, message)

    def _connect(self, identity: bytes, hello: Hello) -> None:
        try:
            pidfd = os.pidfd_open(hello.pid)
            self._poller.register(pidfd, zmq.POLLIN)
        except OSError:  # already gone, or in another pid namespace: its silence will tell
            pidfd = None
        self._connections[identity] = Connection(identity, hello, pidfd)

    def _lost(self, ready: set[object]) -> Iterator[Lost]:
        silent_since = time.monotonic() - LOST_AFTER_S
        for connection in self.connections:
            died = connection.pidfd is not None and connection.pidfd in ready
            if died or connection.last_heard < silent_since:
                self._forget(connection)
                yield Lost(connection, died=died)

    def _forget(self, connection: Connection) -> None:
        self._connections.pop(connection.identity, None)
        if connection.pidfd is not None:
            self._poller.unregister(connection.pidfd)
            os.close(connection.pidfd)
            connection.pidfd = None

    def _beat(self) -> None:
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_S
            for connection in self.connections:
                self.send(connection, Ping())
