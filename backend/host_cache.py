"""Host memory behind the cache's host tier, and the copies between it and the device.

On CUDA the copies run on a stream of their own beside the steps: a copy begins when the steps launched before it have
ended, and only a step that touches one of its blocks waits for it. Host memory is page-locked, so that the host waits
for nothing.
"""

from collections.abc import Iterable
from typing import Any

import psutil
import torch
from torch import Tensor

from limpet.backend.config import ConfigError


class HostCache:
    """`num_blocks` blocks of host memory for a cache [layers, parts, blocks, ...]; only the runner's thread uses it."""

    def __init__(self, cache: Tensor, num_blocks: int) -> None:
        """Raises ConfigError if there is not so much memory free."""
        self._device_blocks = cache.movedim(2, 0)  # [blocks, layers, parts, block_size, ...]
        shape = torch.Size((num_blocks, *self._device_blocks.shape[1:]))
        num_bytes, num_free = shape.numel() * cache.dtype.itemsize, psutil.virtual_memory().available
        if num_bytes > num_free:
            raise ConfigError(f"host_cache_bytes is {num_bytes} in whole blocks; {num_free} bytes of memory are free.")
        self._host_blocks = torch.empty(shape, dtype=cache.dtype)
        self._copies = _CudaCopies(self._host_blocks, cache.device) if cache.is_cuda else None

    def offload(self, moves: list[tuple[int, int]]) -> None:
        """Copy blocks of the device to host blocks."""
        self._move([(self._host_blocks[host], self._device_blocks[block], block) for block, host in moves])

    def load(self, moves: list[tuple[int, int]]) -> None:
        """Copy host blocks to blocks of the device."""
        self._move([(self._device_blocks[block], self._host_blocks[host], block) for host, block in moves])

    def await_copies(self, blocks: Iterable[int]) -> None:
        """What is launched from now on waits for copies from or to these blocks of the device."""
        if self._copies is not None:
            self._copies.await_blocks(blocks)

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()

    def _move(self, moves: list[tuple[Tensor, Tensor, int]]) -> None:
        if self._copies is not None:
            self._copies.move(moves)
            return
        for target, source, _ in moves:
            target.copy_(source)


class _CudaCopies:
    """A stream for copies, and an event for each block of the device whose copy may still run."""

    def __init__(self, host_blocks: Tensor, device: torch.device) -> None:
        """Locks the host memory in place."""
        self._host_blocks = host_blocks
        self._device = device
        # Not torch's pinned allocator: it rounds up to a power of two.
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(host_blocks.data_ptr(), host_blocks.nbytes, 0))
        self._runtime = runtime
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._running: dict[int, torch.cuda.Event] = {}

    def move(self, moves: list[tuple[Tensor, Tensor, int]]) -> None:
        if not moves:
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source, _ in moves:
                target.copy_(source, non_blocking=True)
        copied = self._stream.record_event()
        self._running.update((block, copied) for _, _, block in moves)

    def await_blocks(self, blocks: Iterable[int]) -> None:
        if self._running:
            for copied in {self._running.pop(block) for block in blocks if block in self._running}:
                torch.cuda.current_stream(self._device).wait_event(copied)

    def close(self) -> None:
        self._stream.synchronize()
        torch.cuda.check_error(self._runtime.cudaHostUnregister(self._host_blocks.data_ptr()))
