"""JSON files of a checkpoint: objects, read with an error that names the file."""

import json
from pathlib import Path
from typing import Any

from limpet.converter.errors import ConversionError


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file; raises ConversionError if it is missing or no JSON object."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConversionError(f"{path.name} is missing in {path.parent.name or path.parent}.") from None
    except ValueError as error:
        raise ConversionError(f"{path.name} is no valid JSON ({error}).") from None
    if not isinstance(value, dict):
        raise ConversionError(f"{path.name} holds no JSON object.")
    return value


def read_json_if_present(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
