"""What a request is refused with."""

from limpet.backend.link.messages import ErrorCode


class RequestError(Exception):
    """One request fails, with a Triton error code and one sentence: what was wrong, what is allowed."""

    def __init__(self, message: str, code: ErrorCode = "INVALID_ARG") -> None:
        super().__init__(message)
        self.message = message
        self.code = code
