"""A GGUF file: its metadata and its tensors, dequantised one at a time."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from limpet.converter.errors import ConversionError
from limpet.converter.rules import TensorInfo

_MAGIC = b"GGUF"


class GGUFFile:
    """Metadata by key and tensors in float32; raises ConversionError if the file is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise ConversionError(f"{path.name} is no GGUF file.")
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError):
            # The library indexes past a cut file or meets nonsense where the header should be.
            raise ConversionError(f"{path.name} is damaged or cut short: download it again.") from None
        self.metadata: Mapping[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        self._entries = {tensor.name: tensor for tensor in reader.tensors}
        self.tensors: Mapping[str, TensorInfo] = {name: self._info(name) for name in self._entries}

    def require(self, key: str) -> Any:
        if key not in self.metadata:
            raise ConversionError(f"{self.path.name} lacks the metadata key {key}.")
        return self.metadata[key]

    def quantisations(self) -> list[str]:
        """Names of the tensors' types, the one with most bytes first."""
        sizes: dict[str, int] = {}
        for entry in self._entries.values():
            kind = entry.tensor_type.name
            sizes[kind] = sizes.get(kind, 0) + int(entry.n_bytes)
        return sorted(sizes, key=lambda kind: -sizes[kind])

    def read(self, name: str) -> torch.Tensor:
        """The tensor's values in float32, row-major as in Hugging Face files."""
        entry = self._entries[name]
        shape = self.tensors[name].shape
        # Read, not mapped: a mapped file would count as this process's memory while the whole of it is converted.
        raw = np.fromfile(self.path, dtype=np.uint8, count=int(entry.n_bytes), offset=int(entry.data_offset))
        if raw.nbytes != entry.n_bytes:
            raise ConversionError(f"{self.path.name} ends within tensor {name}: download it again.")
        block, block_bytes = GGML_QUANT_SIZES[entry.tensor_type]
        rows = raw.reshape(*shape[:-1], shape[-1] // block * block_bytes)
        try:
            values = dequantize(rows, entry.tensor_type)
        except NotImplementedError:
            kind = GGMLQuantizationType(entry.tensor_type).name
            raise ConversionError(f"Tensor {name} has type {kind}, which the gguf library cannot dequantise.") from None
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).reshape(shape)

    def file_of(self, name: str) -> None:
        return None

    def _info(self, name: str) -> TensorInfo:
        # GGUF lists the fastest dimension first.
        shape = tuple(int(size) for size in reversed(self._entries[name].shape))
        if self._entries[name].data_offset + self._entries[name].n_bytes > self.path.stat().st_size:
            raise ConversionError(f"{self.path.name} is cut short: it ends before tensor {name} does.")
        assert math.prod(shape) == self._entries[name].n_elements
        return TensorInfo(shape, torch.float32)
