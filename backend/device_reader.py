"""Tensors of safetensors files into a GPU's memory at the disk's speed.

Threads read pieces of the file into a ring of pinned buffers, and each piece is copied to the device while the next
ones are read: the host never holds more of the model than the ring.
"""

import json
import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

PIECE_BYTES = 16 << 20
NUM_BUFFERS, NUM_THREADS = 16, 8
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Wanted(NamedTuple):
    """What a tensor of the file has at `source` (of each dimension a slice with a start and a stop), for `target`."""

    stored: str
    source: tuple[slice, ...]
    target: Tensor  # contiguous


@dataclass(frozen=True)
class _Piece:
    """So many bytes of the file from each offset on, one after the other, for `target` (uint8)."""

    offsets: Sequence[int]
    num_bytes: int
    target: Tensor


@dataclass
class _Buffer:
    memory: Tensor  # [PIECE_BYTES] uint8
    copied: torch.cuda.Event | None = None  # when the device has what was in it


class DeviceReader:
    """The ring and its threads, for a CUDA device (or the CPU, for tests); leave the `with` block to free them."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        memory = torch.empty((NUM_BUFFERS, PIECE_BYTES), dtype=torch.uint8, pin_memory=self._on_cuda)
        self._free = deque(_Buffer(part) for part in memory)
        self._reading: deque[tuple[Future[None], _Buffer, _Piece]] = deque()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="limpet-weights")

    def fill(self, path: Path, wanted: Sequence[Wanted]) -> None:
        """Copy what is wanted of the file's tensors, cast to the targets' dtypes; raises OSError."""
        with path.open("rb", buffering=0) as file:
            data_start, header = _read_header(file.fileno())
            for stored, source, target in wanted:
                entry = header[stored]
                dtype = DTYPES[entry["dtype"]]
                raw = target if dtype == target.dtype else torch.empty_like(target, dtype=dtype)
                runs = _runs(data_start + entry["data_offsets"][0], entry["shape"], source, dtype.itemsize)
                for piece in _pieces(*runs, raw):
                    self._read(file.fileno(), piece)
                if raw is not target:
                    self._finish(0)
                    target.copy_(raw)
            self._finish(0)

    def _read(self, descriptor: int, piece: _Piece) -> None:
        """Let a thread read the piece, once a buffer is free."""
        if not self._free:
            self._finish(NUM_BUFFERS - 1)
        buffer = self._free.popleft()
        if buffer.copied is not None:
            buffer.copied.synchronize()
        view = buffer.memory.numpy().data[: len(piece.target)]
        self._reading.append((self._threads.submit(_read_piece, descriptor, view, piece), buffer, piece))

    def _finish(self, num_left: int) -> None:
        """Copy what was read to the device, until only so many reads are left."""
        while len(self._reading) > num_left:
            future, buffer, piece = self._reading.popleft()
            future.result()
            piece.target.copy_(buffer.memory[: len(piece.target)], non_blocking=True)
            if self._on_cuda:
                buffer.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                buffer.copied.record()
            self._free.append(buffer)

    def __enter__(self) -> "DeviceReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        if self._on_cuda:
            torch.cuda.synchronize()


def _read_header(descriptor: int) -> tuple[int, dict[str, Any]]:
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    return 8 + length, json.loads(os.pread(descriptor, length, 8))


def _runs(start: int, shape: Sequence[int], source: Sequence[slice], item_bytes: int) -> tuple[list[int], int]:
    """Where in the file the source's runs begin, which are as long as each other, and their bytes."""
    starts, run = [start], item_bytes
    strides = [math.prod(shape[dim + 1 :]) * item_bytes for dim in range(len(shape))]
    is_whole = [part.stop - part.start == size for part, size in zip(source, shape, strict=True)]
    num_outer = next((dim for dim in reversed(range(len(shape))) if not is_whole[dim]), 0)
    for dim in range(num_outer):
        starts = [each + strides[dim] * place for each in starts for place in range(*source[dim].indices(shape[dim]))]
    if shape:
        run = (source[num_outer].stop - source[num_outer].start) * strides[num_outer]
        starts = [each + source[num_outer].start * strides[num_outer] for each in starts]
    return starts, run


def _pieces(starts: list[int], run_bytes: int, target: Tensor) -> Iterator[_Piece]:
    """Several short runs, or a part of a long one."""
    flat = target.view(-1).view(torch.uint8)
    if run_bytes > PIECE_BYTES:
        for number, start in enumerate(starts):
            run = flat[number * run_bytes : (number + 1) * run_bytes]
            for place, part in enumerate(torch.split(run, PIECE_BYTES)):
                yield _Piece([start + place * PIECE_BYTES], len(part), part)
        return
    per_piece = max(1, PIECE_BYTES // max(run_bytes, 1))
    for first in range(0, len(starts), per_piece):
        some = starts[first : first + per_piece]
        yield _Piece(some, run_bytes, flat[first * run_bytes : (first + len(some)) * run_bytes])


def _read_piece(descriptor: int, view: memoryview, piece: _Piece) -> None:
    for number, offset in enumerate(piece.offsets):
        _read_fully(descriptor, view[number * piece.num_bytes : (number + 1) * piece.num_bytes], offset)


def _read_fully(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise OSError("it ends too early")
        view, offset = view[count:], offset + count
