"""How the values of options are read: numbers may be strings, ranges are part of every refusal."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from limpet.backend.front_end.errors import RequestError

Converter: TypeAlias = Callable[[str, Any], Any]


def _number(value: Any) -> int | float | None:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
        try:
            return float(value)
        except ValueError:
            return None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def as_json(value: Any) -> Any:
    """A string that holds JSON, as what it holds."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _within(number: float, low: float | None, high: float | None) -> bool:
    return (low is None or number >= low) and (high is None or number <= high)


def _range(low: float | None, high: float | None) -> str:
    if low is None:
        return "" if high is None else f" up to {high}"
    return f" from {low}" if high is None else f" from {low} to {high}"


def refusal(name: str, value: Any, allowed: str) -> RequestError:
    return RequestError(f"{name} is {shown(value)}; allowed: {allowed}.")


def shown(value: Any) -> str:
    """The value as the client may have written it, cut where it is long."""
    try:
        written = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        written = repr(value)
    return written if len(written) <= 60 else f"{written[:60]}…"


def integer(low: int | None = None, high: int | None = None) -> Converter:
    """Whole numbers of a range, also written as 5.0 or "5"."""
    allowed = f"whole numbers{_range(low, high)}"

    def convert(name: str, value: Any) -> int:
        number = _number(value)
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if not isinstance(number, int) or not _within(number, low, high):
            raise refusal(name, value, allowed)
        return number

    return convert


def real(low: float | None = None, high: float | None = None) -> Converter:
    """Finite numbers of a range."""
    allowed = f"numbers{_range(low, high)}"

    def convert(name: str, value: Any) -> float:
        try:
            number = float("nan" if (given := _number(value)) is None else given)
        except OverflowError:  # a whole number beyond all floats
            number = math.inf
        if not math.isfinite(number) or not _within(number, low, high):
            raise refusal(name, value, allowed)
        return number

    return convert


def boolean(name: str, value: Any) -> bool:
    """True and false, also as 1, 0, "true", "false"."""
    known = {
        True: True,
        False: False,
        "true": True,
        "false": False,
        "True": True,
        "False": False,
        "1": True,
        "0": False,
    }
    if not isinstance(value, (bool, int, str)) or value not in known:
        raise refusal(name, value, "true, false")
    return known[value]


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refusal(name, value, "a string")
    return value


def choice(*allowed: str) -> Converter:
    """One of some words."""

    def convert(name: str, value: Any) -> str:
        if value not in allowed:
            raise refusal(name, value, ", ".join(allowed))
        return str(value)

    return convert


def strings(max_strings: int, max_chars: int) -> Converter:
    """One string or a list of strings; empty ones do not count."""
    allowed = f"up to {max_strings} strings of up to {max_chars} characters"

    def convert(name: str, value: Any) -> tuple[str, ...]:
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, Sequence) or not all(isinstance(entry, str) for entry in listed):
            raise refusal(name, value, allowed)
        given = tuple(entry for entry in listed if entry)
        if len(given) > max_strings or any(len(entry) > max_chars for entry in given):
            raise RequestError(f"{name} is too much; allowed: {allowed}.")
        return given

    return convert


def integers(name: str, value: Any) -> tuple[int, ...]:
    """A list of whole numbers, also as a JSON string (a request parameter cannot be a list)."""
    listed = as_json(value)
    listed = listed if isinstance(listed, Sequence) else [listed]
    if not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in listed):
        raise refusal(name, value, "a list of whole numbers")
    return tuple(listed)


def objects(max_objects: int) -> Converter:
    """A list of JSON objects, also as a JSON string."""
    allowed = f"a list of up to {max_objects} objects"

    def convert(name: str, value: Any) -> tuple[Mapping[str, Any], ...]:
        listed = as_json(value)
        if not isinstance(listed, list) or not all(isinstance(entry, Mapping) for entry in listed):
            raise refusal(name, value, allowed)
        if len(listed) > max_objects:
            raise RequestError(f"{name} has {len(listed)} entries; allowed: {allowed}.")
        return tuple(listed)

    return convert


def biases(max_entries: int, bound: float) -> Converter:
    """An object of token ids and what is added to their logits; as pairs, which a frozen struct can hold."""
    allowed = f"an object of up to {max_entries} token ids with numbers from {-bound} to {bound}"
    to_id, to_bias = integer(), real(-bound, bound)

    def convert(name: str, value: Any) -> tuple[tuple[int, float], ...]:
        entries = as_json(value)
        if not isinstance(entries, Mapping) or len(entries) > max_entries:
            raise refusal(name, value, allowed)
        return tuple((to_id(name, token), to_bias(name, bias)) for token, bias in entries.items())

    return convert


def identifier(name: str, value: Any) -> str:
    """A sequence id: a string or a whole number; they compare as strings."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise refusal(name, value, "a string or a whole number")
    return str(value)
