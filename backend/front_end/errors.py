"""What a request is refused with."""

from limpet.backend.link.messages import ErrorCode


class RequestError(Exception):
    """One request fails, with a Triton error code and one sentence: what was wrong, what is allowed."""

    def __init__(self, message: str, code: ErrorCode = "INVALID_ARG") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


def coded_text(code: ErrorCode, message: str) -> str:
    """An error's text begins with its code: a stream passes on nothing else, and HTTP answers 400 for every code."""
    return f"[{code}] {message}"
