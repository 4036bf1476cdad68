"""Types of command-line arguments; what they refuse is wrong usage, exit code 2."""

import argparse
from typing import NoReturn

from limpet.client.endpoint import check_address
from limpet.client.errors import InvalidRequest


def address(text: str) -> str:
    """HOST:PORT of a server."""
    try:
        return check_address(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def port(text: str) -> int:
    """A port to listen on."""
    if not 0 < (number := whole_number(text)) < 65536:
        refuse(text, "port: 1 to 65535")
    return number


def seconds(text: str) -> float:
    """A time to wait, in seconds."""
    if not 0 <= (number := real_number(text)) < float("inf"):
        refuse(text, "time: seconds, 0 or more")
    return number


def whole_number(text: str) -> int:
    """-1 if the text is none."""
    return int(text) if text.isascii() and text.isdigit() else -1


def real_number(text: str) -> float:
    """NaN, which is in no range, if the text is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def refuse(text: str, allowed: str) -> NoReturn:
    """Raise what argparse turns into its message."""
    raise argparse.ArgumentTypeError(f"{text!r} is no {allowed}")
