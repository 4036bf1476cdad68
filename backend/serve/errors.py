"""What ends limpet-serve, and with which exit code."""


class ServeError(Exception):
    """The server could not go on; the message is one sentence with the cause."""

    exit_code = 1


class RefusedError(ServeError):
    """Nothing was started: an argument or this machine does not fit; the message says what to change."""

    exit_code = 2
