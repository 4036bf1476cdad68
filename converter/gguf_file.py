"""GGUF files: metadata, and tensors dequantised one at a time. A large model may be split over several files."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from limpet.converter.errors import ConversionError
from limpet.converter.rules import TensorInfo
from limpet.converter.source_folder import SourceFolder

_MAGIC = b"GGUF"
_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)


class _Reader(GGUFReader):  # type: ignore[misc]
    def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        # Past the end the library reads nothing, and counts on: of a damaged length for hours.
        if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise ValueError("the header ends past the file")
        return super()._get(offset, dtype, count, override_order)


class _Place(NamedTuple):
    """Where a tensor's bytes are."""

    path: Path
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFFile:
    """Metadata by key, and tensors in float32; raises ConversionError if a file is damaged or a part is missing.

    A stack of matrices, such as experts are stored in, is listed as its members: NAME[0], NAME[1], …
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: Mapping[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, _Place] = {}
        for number, part in enumerate(_part_paths(path)):
            metadata, entries = _read_header(part)
            if number == 0:
                self.metadata = metadata
            for entry in entries:
                self._add(part, entry)

    def require(self, key: str) -> Any:
        if key not in self.metadata:
            raise ConversionError(f"{self.path.name} lacks the metadata key {key}.")
        return self.metadata[key]

    def main_type(self) -> str:
        """The name of the type in which most bytes are stored."""
        sizes: dict[str, int] = {}
        for place in self._places.values():
            kind = place.kind.name
            sizes[kind] = sizes.get(kind, 0) + place.num_bytes
        return max(sizes, key=lambda kind: sizes[kind])

    def read(self, name: str) -> torch.Tensor:
        """The tensor's values in float32, row-major as in Hugging Face files."""
        place, shape = self._places[name], self.tensors[name].shape
        # Read, not mapped: a mapped file would count as this process's memory while the whole of it is converted.
        raw = np.fromfile(place.path, dtype=np.uint8, count=place.num_bytes, offset=place.offset)
        block, block_bytes = GGML_QUANT_SIZES[place.kind]
        rows = raw.reshape(*shape[:-1], shape[-1] // block * block_bytes)
        try:
            values = dequantize(rows, place.kind)
        except NotImplementedError:
            kind = place.kind.name
            raise ConversionError(f"Tensor {name} has type {kind}, which the gguf library cannot dequantise.") from None
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).reshape(shape)

    def file_of(self, name: str) -> None:
        return None

    def _add(self, path: Path, entry: Any) -> None:
        if entry.data_offset + entry.n_bytes > path.stat().st_size:
            raise ConversionError(f"{path.name} is cut short: it ends before tensor {entry.name} does.")
        # GGUF lists the fastest dimension first.
        shape = tuple(int(size) for size in reversed(entry.shape))
        if len(shape) < 3:
            self._list(entry.name, shape, _Place(path, entry.tensor_type, int(entry.data_offset), int(entry.n_bytes)))
            return
        member_bytes = int(entry.n_bytes) // shape[0]
        for index in range(shape[0]):
            offset = int(entry.data_offset) + index * member_bytes
            self._list(f"{entry.name}[{index}]", shape[1:], _Place(path, entry.tensor_type, offset, member_bytes))

    def _list(self, name: str, shape: tuple[int, ...], place: "_Place") -> None:
        self.tensors[name] = TensorInfo(shape, torch.float32)
        self._places[name] = place


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def gguf_models(folder: Path) -> list[str]:
    """Names of the GGUF files in a folder; of one in several parts the first part's."""
    found: dict[str, str] = {}
    for path in sorted(filter(is_gguf, folder.iterdir())):
        match = _PART_NAME.fullmatch(path.name)
        found.setdefault(match[1] if match else path.name, path.name)
    return list(found.values())


def _part_paths(path: Path) -> list[Path]:
    """All files of a model, the one with the metadata first, whichever of them `path` is."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count, suffix = match[1], match[3], match[4]
    folder = SourceFolder(path.parent)
    names = (f"{stem}-{number:05}-of-{count}{suffix}" for number in range(1, int(count) + 1))
    paths = [path if name == path.name else folder.file(name) for name in names]
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        raise ConversionError(f"{missing[0]}, a part of the model, is missing in {folder.name}.")
    return paths


def _read_header(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """A file's metadata and descriptions of tensors."""
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ConversionError(f"{path.name} is no GGUF file.")
    try:
        reader = _Reader(path)
        return {key: field.contents() for key, field in reader.fields.items()}, reader.tensors
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        # The library indexes past a cut file or meets nonsense where the header should be.
        raise ConversionError(f"{path.name} is damaged or cut short: download it again.") from None
