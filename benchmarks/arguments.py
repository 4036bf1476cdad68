"""Types of the benchmarks' arguments; what they refuse is wrong usage, exit code 2."""

import os
from pathlib import Path

from limpet.client.arguments import real_number, refuse, whole_number


def count(text: str) -> int:
    """A whole number from 1."""
    if (number := whole_number(text)) < 1:
        refuse(text, "whole number from 1")
    return number


def rate(text: str) -> float:
    """So many in a second."""
    if not 0 < (number := real_number(text)) < float("inf"):
        refuse(text, "number above 0")
    return number


def new_file(text: str) -> Path:
    """A file that can be written once everything is measured."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        refuse(text, "file in a folder that can be written")
    return path
