"""Numbers of a GGUF file's metadata under the keys `ARCHITECTURE.*`."""

import math
from typing import Any

import numpy as np

from limpet.converter.errors import ConversionError
from limpet.converter.gguf_file import GGUFFile


class GGUFNumbers:
    """The methods raise ConversionError for a value that is missing or does not fit."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file = file
        self._architecture = architecture

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; a default of 0 allows any."""
        value = self.value(key, default)
        if not isinstance(value, int) or not (default == 0 or 0 < value < 1 << 31):
            raise ConversionError(f"The GGUF file's {key} is {value!r}; one positive integer is needed.")
        return value

    def positive(self, key: str, default: float) -> float:
        value = self.value(key, default)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConversionError(f"The GGUF file's {key} is {value!r}; a positive number is needed.")
        # Stored as float32: the shortest decimal that rounds to it is what the model's authors wrote.
        return float(str(np.float32(value)))

    def value(self, key: str, default: float | bool | None) -> Any:
        full = f"{self._architecture}.{key}"
        return self._file.require(full) if default is None else self._file.metadata.get(full, default)
