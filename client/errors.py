"""One family of exceptions for everything that can go wrong with a request."""

import re
from typing import ClassVar

import grpc


class LimpetError(Exception):
    """A request failed; the text is one sentence, `code` the wire contract's name for the kind of failure."""

    code: ClassVar[str] = "UNKNOWN"


class InvalidRequest(LimpetError):
    """The request can never work as it is; the sentence says what is allowed."""

    code = "INVALID_ARG"


class NotFound(LimpetError):
    """The server has no such model, adapter or session."""

    code = "NOT_FOUND"


class SessionNotFound(NotFound):
    """The session ended, expired, or the server was restarted since its last turn."""


class Unavailable(LimpetError):
    """The server cannot answer now (starting, stopping, queue full): the same request may work later."""

    code = "UNAVAILABLE"


class SessionBusy(Unavailable):
    """Another turn of this session is still running."""


class QueueFull(Unavailable):
    """As many requests wait as may wait."""


class Cancelled(LimpetError):
    """The request was cancelled before its end: by `close`, by a lost client, or by the server."""

    code = "CANCELLED"


class ServerError(LimpetError):
    """Something broke inside the server."""

    code = "INTERNAL"


class ConnectionLost(LimpetError):
    """There is no connection to the server, or it broke off before the answer was complete."""

    code = "CONNECTION_LOST"


class RequestTimeout(LimpetError):
    """The `timeout` that the caller gave was over before the answer was complete."""

    code = "TIMEOUT"


_BY_CODE: dict[str, type[LimpetError]] = {
    kind.code: kind for kind in (InvalidRequest, NotFound, Unavailable, Cancelled, ServerError)
}
_CODED = re.compile(rf"^(?:\[request id: [^\]]*\] )?\[({'|'.join(_BY_CODE)})\] (.*)$", re.DOTALL)
_PHRASES: tuple[tuple[str, type[LimpetError]], ...] = (
    ("session not found", SessionNotFound),
    ("session busy", SessionBusy),
    ("the queue is full", QueueFull),
)
# On a stream Triton passes on an error's text and not its code, so Limpet writes the code into the text; Triton's own
# errors can be told apart only by their wording.
_TRITON_WORDING: tuple[tuple[str, type[LimpetError]], ...] = (
    ("has no available versions", Unavailable),
    ("is not ready", Unavailable),
    ("is not healthy", Unavailable),
    ("unknown model", NotFound),
    ("Failed to process the request", ServerError),
)


def error_from_text(text: str) -> LimpetError:
    """The exception for an error text that the server sent."""
    coded = _CODED.match(text)
    if coded is None:
        kind = next((kind for wording, kind in _TRITON_WORDING if wording in text), InvalidRequest)
        return kind(text)
    code, sentence = coded.groups()
    start = sentence.lower()
    return next((kind for phrase, kind in _PHRASES if start.startswith(phrase)), _BY_CODE[code])(sentence)


def error_from_rpc(error: grpc.RpcError, address: str) -> LimpetError:
    """The exception for a failed RPC to `address`."""
    code, details = error.code(), error.details() or ""
    if _CODED.match(details) or any(wording in details for wording, _ in _TRITON_WORDING):
        return error_from_text(details)
    if code is grpc.StatusCode.UNAVAILABLE:
        return ConnectionLost(f"No connection to {address}: {details}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestTimeout(f"{address} did not answer completely within the timeout.")
    if code is grpc.StatusCode.CANCELLED:
        return Cancelled("The request was cancelled.")
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED):
        return InvalidRequest(details)
    return ServerError(f"{address} answered {code.name}: {details}")
