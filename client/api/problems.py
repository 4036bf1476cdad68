"""What went wrong, as OpenAI's clients expect it: a status, an error object, and when to come back."""

from dataclasses import dataclass
from typing import Any

from limpet.client.errors import (
    Cancelled,
    InvalidRequest,
    LimpetError,
    NotFound,
    QueueFull,
    ServerError,
    SessionBusy,
    SessionNotFound,
)

RETRY_AFTER_S = 1


@dataclass(eq=False)
class Problem(Exception):
    """A refused or failed request; `message` is one sentence."""

    message: str
    status: int = 400
    kind: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.status in (409, 429, 503) else {}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


# The first that fits; everything else (starting, stopping, no connection) is 503.
_BY_ERROR: tuple[tuple[type[LimpetError], int, str, str | None], ...] = (
    (InvalidRequest, 400, "invalid_request_error", None),
    (SessionNotFound, 404, "invalid_request_error", "session_not_found"),
    (NotFound, 404, "invalid_request_error", "model_not_found"),
    (SessionBusy, 409, "conflict_error", "session_busy"),
    (QueueFull, 429, "rate_limit_error", "queue_full"),
    (Cancelled, 408, "timeout_error", "cancelled"),
    (ServerError, 500, "server_error", "internal"),
)


def problem(error: LimpetError) -> Problem:
    """The server's refusal or failure."""
    for kind, status, name, code in _BY_ERROR:
        if isinstance(error, kind):
            return Problem(str(error), status, name, code)
    return Problem(str(error), 503, "server_error", "unavailable")
