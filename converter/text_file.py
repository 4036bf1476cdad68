"""Text and JSON files of a checkpoint; JSON decoded into typed records, with errors that name the file and the key."""

import json
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from limpet.converter.errors import ConversionError

Count: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 31)]
Positive: TypeAlias = Annotated[float, Meta(gt=0, lt=1e30)]
_T = TypeVar("_T")


def read_text(path: Path) -> str:
    """The file's text; raises ConversionError if it is missing or no UTF-8."""
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise ConversionError(f"{path.name} is missing in {path.parent.name or path.parent}.") from None
    except UnicodeDecodeError:
        raise ConversionError(f"{path.name} is no UTF-8 text.") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; raises ConversionError if it is missing or no JSON object."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{path.name} is no valid JSON ({error}).") from None
    if not isinstance(value, dict):
        raise ConversionError(f"{path.name} holds no JSON object.")
    return value


def read_json_if_present(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def as_record(value: object, kind: type[_T], file_name: str) -> _T:
    """The value as a record of this type, unknown keys left out; raises ConversionError for a key that does not fit."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ConversionError(f"{file_name} has a value that does not fit: {error}.") from None
