"""How a device's work is queued, so that the engine goes on while a step runs.

Both queues run strictly in order, and both give futures: `run` for work whose result stays on the device, `read` for
tensors that the host wants, together and at one wait.
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

    def read(self, work: Callable[[], list[Tensor]], unpack: Callable[[list[Tensor]], T]) -> "Future[T]":
        """What `unpack` makes of the tensors that `work` computes, once they are on the host."""

    def close(self) -> None:
        """Wait for what is queued."""


class CpuQueue:
    """A thread computes; what the host wants is there when its work has run."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="limpet-runner")

    def run(self, work: Callable[[], T]) -> "Future[T]":
        return self._worker.submit(work)

    def read(self, work: Callable[[], list[Tensor]], unpack: Callable[[list[Tensor]], T]) -> "Future[T]":
        return self._worker.submit(lambda: unpack(work()))

    def close(self) -> None:
        self._worker.shutdown(wait=True)


class CudaQueue:
    """The CUDA stream is the queue: work is launched at once by the caller, and a thread waits for what the host wants.

    A launching thread beside the engine's would fight it for the interpreter; the waiting one does not.
    """

    def __init__(self) -> None:
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="limpet-reader")

    def run(self, work: Callable[[], T]) -> "Future[T]":
        launched: Future[T] = Future()
        launched.set_result(work())
        return launched

    def read(self, work: Callable[[], list[Tensor]], unpack: Callable[[list[Tensor]], T]) -> "Future[T]":
        on_host = [_to_host(tensor) for tensor in work()]
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        arrived.record()

        def wait() -> T:
            arrived.synchronize()
            return unpack(on_host)

        return self._reader.submit(wait)

    def close(self) -> None:
        self._reader.shutdown(wait=True)


def _to_host(tensor: Tensor) -> Tensor:
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return on_host.copy_(tensor, non_blocking=True)


def device_queue(device: torch.device) -> DeviceQueue:
    return CudaQueue() if device.type == "cuda" else CpuQueue()
