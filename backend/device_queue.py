"""How a device's work is queued, so that the engine goes on while a step runs.

Both queues run strictly in order, and both give futures: `run` for work whose result stays on the device, `read` for
ids that the host wants.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class DeviceQueue(Protocol):
    """Where a runner's work goes."""

    def run(self, work: Callable[[], T]) -> "Future[T]": ...

    def read(self, work: Callable[[], Tensor]) -> "Future[list[int]]":
        """The ids that `work` computes, once they are there."""

    def close(self) -> None:
        """Wait for what is queued."""


class CpuQueue:
    """A thread computes; the ids are there when their work has run."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="limpet-runner")

    def run(self, work: Callable[[], T]) -> "Future[T]":
        return self._worker.submit(work)

    def read(self, work: Callable[[], Tensor]) -> "Future[list[int]]":
        return self._worker.submit(lambda: work().tolist())

    def close(self) -> None:
        self._worker.shutdown(wait=True)


class CudaQueue:
    """The CUDA stream is the queue: work is launched at once by the caller, and a thread waits for the ids.

    A launching thread beside the engine's would fight it for the interpreter; the waiting one does not.
    """

    def __init__(self) -> None:
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="limpet-reader")

    def run(self, work: Callable[[], T]) -> "Future[T]":
        launched: Future[T] = Future()
        launched.set_result(work())
        return launched

    def read(self, work: Callable[[], Tensor]) -> "Future[list[int]]":
        ids = work()
        on_host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
        on_host.copy_(ids, non_blocking=True)
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        arrived.record()
        return self._reader.submit(_wait, arrived, on_host)

    def close(self) -> None:
        self._reader.shutdown(wait=True)


def _wait(arrived: torch.cuda.Event, ids: Tensor) -> list[int]:
    arrived.synchronize()
    values: list[int] = ids.tolist()
    return values


def device_queue(device: torch.device) -> DeviceQueue:
    return CudaQueue() if device.type == "cuda" else CpuQueue()
