"""Ctrl-C while there is nothing to tidy up yet."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Ctrl-C ends the process without a word; as an exception it could come anywhere in the libraries' imports."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # else it is ignored, as in a script's background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
