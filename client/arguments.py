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
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        _refuse(text, "port: 1 to 65535")
    return int(text)


def seconds(text: str) -> float:
    """A time to wait, in seconds."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        _refuse(text, "time: seconds, 0 or more")
    return number


def _refuse(text: str, allowed: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"{text!r} is no {allowed}")
