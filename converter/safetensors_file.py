"""Reading and writing safetensors one tensor at a time, so that memory holds one tensor and not a mapped file.

Format: the header's length as 8 little-endian bytes, the header as JSON (name -> dtype, shape, data_offsets), the data.
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import torch

from limpet.backend.checkpoint import FileEntry
from limpet.converter.errors import ConversionError
from limpet.converter.rules import TensorInfo

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_ALIGNMENT = 64


class SafetensorsReader:
    """The tensors of one file; raises ConversionError if it is cut short or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ranges: dict[str, tuple[int, int]] = {}  # absolute start and end in the file
        self.tensors: dict[str, TensorInfo] = {}
        header, data_start = _read_header(path)
        for name, entry in header.items():
            if name != "__metadata__":
                self._add(name, entry, data_start)

    def read(self, name: str) -> torch.Tensor:
        info, (start, end) = self.tensors[name], self._ranges[name]
        buffer = torch.empty(end - start, dtype=torch.uint8)
        with self.path.open("rb") as file:
            file.seek(start)
            if file.readinto(buffer.numpy().data) != end - start:
                raise ConversionError(f"{self.path.name} ends within tensor {name}: download it again.")
        return buffer.view(info.dtype).reshape(info.shape)

    def _add(self, name: str, entry: dict[str, object], data_start: int) -> None:
        dtype = _DTYPES.get(str(entry.get("dtype")))
        if dtype is None:
            raise ConversionError(f"Tensor {name} in {self.path.name} has the unknown type {entry.get('dtype')}.")
        try:
            shape = tuple(int(n) for n in entry["shape"])  # type: ignore[attr-defined]
            begin, end = (int(n) for n in entry["data_offsets"])  # type: ignore[attr-defined]
        except (KeyError, TypeError, ValueError):
            raise ConversionError(f"{self.path.name} has a damaged entry for tensor {name}.") from None
        if min(shape, default=0) < 0 or begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
            raise ConversionError(f"{self.path.name} has a damaged entry for tensor {name}.")
        if data_start + end > self.path.stat().st_size:
            raise ConversionError(f"{self.path.name} is cut short: it ends before tensor {name} does.")
        self.tensors[name] = TensorInfo(shape, dtype)
        self._ranges[name] = (data_start + begin, data_start + end)


def _read_header(path: Path) -> tuple[dict[str, dict[str, object]], int]:
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise ConversionError(f"{path.name} is no safetensors file, or it is cut short.")
        text = file.read(length)
    try:
        header = json.loads(text)
    except ValueError:
        raise ConversionError(f"{path.name} is no safetensors file, or it is cut short.") from None
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        raise ConversionError(f"{path.name} is no safetensors file, or it is damaged.")
    return header, 8 + length


class SafetensorsWriter:
    """Writes the header at once, then the tensors in the header's order; use as a context manager."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self._pending = list(tensors.items())
        self._sha256 = hashlib.sha256()
        self._num_bytes = 0
        self._file = path.open("xb")
        try:
            self._write(encode_header(tensors))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if error is None and self._pending:
            raise ValueError(f"tensor {self._pending[0][0]} was never written")

    def write(self, name: str, parts: Iterable[torch.Tensor]) -> None:
        """Append the tensor, which must be the header's next one, from its rows in order."""
        expected, info = self._pending.pop(0)
        if name != expected:
            raise ValueError(f"expected {expected}, got {name}")
        num_bytes = self._num_bytes + math.prod(info.shape) * info.dtype.itemsize
        for part in parts:
            if part.dtype != info.dtype:
                raise ValueError(f"{name} is to be {info.dtype}, got {part.dtype}")
            self._write(part.contiguous().view(-1).view(torch.uint8).numpy().data)
        if self._num_bytes != num_bytes:
            raise ValueError(f"{name} is off by {self._num_bytes - num_bytes} bytes of its shape {info.shape}")

    def entry(self) -> FileEntry:
        """Size and checksum of what was written."""
        return FileEntry(self._num_bytes, self._sha256.hexdigest())

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._sha256.update(data)
        self._num_bytes += len(data)


def encode_header(tensors: Mapping[str, TensorInfo]) -> bytes:
    """Length and header of a file with these tensors one after the other; the data starts aligned."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, info in tensors.items():
        end = offset + math.prod(info.shape) * info.dtype.itemsize
        header[name] = {
            "dtype": _DTYPE_NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
