"""Faults of a checkpoint that a library finds, in one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager

from limpet.converter.errors import ConversionError


@contextmanager
def told_as(fault: str) -> Iterator[None]:
    """Whatever a library raises inside becomes a ConversionError: `fault`, with the library's words behind it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, ConversionError):
        raise
    except BaseException as error:  # noqa: BLE001 - tokenizers raises plain Exception, and panics that are none
        raise ConversionError(f"{fault} ({error}).") from None
