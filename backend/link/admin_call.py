"""One operation of limpet_admin on one or several engines, over connections that last as long as the call."""

import time
from collections.abc import Mapping

import msgspec
import zmq

from limpet.backend.link.messages import Admin, AdminReply, Bye, Failed, Hello, ToFrontEnd
from limpet.backend.link.ownership import EngineRuntime

_KEY = 1  # one call a connection
_BYE_LINGER_MS = 500


def call_engines(
    engines: Mapping[str, EngineRuntime], hello: Hello, op: str, arguments: str, timeout_s: float
) -> dict[str, AdminReply | Failed]:
    """Ask all engines at once; one that is not there or does not answer in time is Failed with UNAVAILABLE."""
    context = zmq.Context()
    encode = msgspec.msgpack.Encoder().encode
    sockets: dict[zmq.Socket[bytes], str] = {}
    answers: dict[str, AdminReply | Failed] = {}
    try:
        for name, runtime in engines.items():
            if runtime.state() is None:
                answers[name] = _unavailable(f"The engine of {name} is not running.")
                continue
            socket = context.socket(zmq.DEALER)
            socket.set(zmq.LINGER, _BYE_LINGER_MS)
            socket.connect(runtime.address)
            socket.send(encode(hello))
            socket.send(encode(Admin(key=_KEY, op=op, arguments=arguments)))
            sockets[socket] = name
        answers |= _collect(sockets, timeout_s)
        for socket in sockets:
            socket.send(encode(Bye()))
    finally:
        context.destroy(linger=_BYE_LINGER_MS)
    for name in engines:
        answers.setdefault(name, _unavailable(f"The engine of {name} did not answer within {timeout_s:g} s."))
    return answers


def _collect(sockets: Mapping["zmq.Socket[bytes]", str], timeout_s: float) -> dict[str, AdminReply | Failed]:
    decode = msgspec.msgpack.Decoder(ToFrontEnd).decode
    answers: dict[str, AdminReply | Failed] = {}
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    deadline = time.monotonic() + timeout_s
    while len(answers) < len(sockets) and (left := deadline - time.monotonic()) > 0:
        for socket, _ in poller.poll(int(left * 1000) + 1):
            message = decode(socket.recv())
            if isinstance(message, (AdminReply, Failed)):
                answers[sockets[socket]] = message
    return answers


def _unavailable(message: str) -> Failed:
    return Failed(key=_KEY, code="UNAVAILABLE", message=message)
