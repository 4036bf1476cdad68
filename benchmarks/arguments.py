"""Types of the benchmarks' arguments; what they refuse is wrong usage, exit code 2."""

import argparse
import os
from pathlib import Path
from typing import NoReturn


def count(text: str) -> int:
    """A whole number from 1."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        _refuse(text, "whole number from 1")
    return int(text)


def rate(text: str) -> float:
    """So many in a second."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        _refuse(text, "number above 0")
    return number


def new_file(text: str) -> Path:
    """A file that can be written once everything is measured."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        _refuse(text, "file in a folder that can be written")
    return path


def _refuse(text: str, allowed: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"{text!r} is no {allowed}")
