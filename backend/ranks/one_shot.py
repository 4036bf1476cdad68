"""All-reduce of small tensors between GPUs of one machine: every rank reads the others' parts itself, in one kernel.

A ring of copies, as NCCL has it, takes longer to begin than a decode step's few hidden states take to travel. The parts
lie in symmetric memory, which all ranks have mapped: one buffer for all sums, since the kernel ends only when all ranks
have read it. All ranks add in the same order, so that the sums have the same bits. NVLink multicast is not used.
"""

import logging
import time

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from limpet.backend.config import ConfigError

MAX_BYTES = {2: 2 << 20, 4: 512 << 10, 8: 256 << 10}  # by ranks: past it NCCL is quicker
_DTYPES = (torch.bfloat16, torch.float32)  # that the kernel adds
_ALIGNMENT = 16  # bytes
_ANSWERS_WITHIN_S = 20.0

logger = logging.getLogger(__name__)


class OneShotReducer:
    """For tensors of `dtype` up to MAX_BYTES; to be made by all ranks at once, before anything is captured.

    Raises RuntimeError where the GPUs do not reach each other's memory.
    """

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.max_bytes = MAX_BYTES[size]
        group = dist.group.WORLD
        assert group is not None
        self._group = group.group_name
        self._buffer = symmetric_memory.empty(self.max_bytes // dtype.itemsize, dtype=dtype, device=device)
        symmetric_memory.rendezvous(self._buffer, self._group)

    def takes(self, x: Tensor) -> bool:
        return (
            x.dtype == self._buffer.dtype
            and 0 < x.nbytes <= self.max_bytes
            and x.nbytes % _ALIGNMENT == 0
            and x.data_ptr() % _ALIGNMENT == 0
            and x.is_contiguous()
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in a new tensor."""
        part = self._buffer[: x.numel()].view(x.shape)
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(part, x, "sum", self._group)
        return total


def open_one_shot(rank: int, size: int, device: torch.device, dtype: torch.dtype) -> OneShotReducer | None:
    """The reducer if it gives every rank the right sum, else None on all of them, and the log says why.

    Raises ConfigError if it gives none in time: the GPU then waits for ever.
    """
    if size not in MAX_BYTES or dtype not in _DTYPES:
        return None
    reducer: OneShotReducer | None = None
    try:
        reducer = OneShotReducer(size, device, dtype)
        is_right = _check(reducer, rank, size, device, dtype)
    except RuntimeError as error:
        logger.warning("All-reduce through NCCL alone: %s", str(error).splitlines()[0])
        is_right = False
    votes = torch.tensor([int(is_right)], device=device)
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return reducer if votes.item() else None


def _check(reducer: OneShotReducer, rank: int, size: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether whole numbers add up, and all ranks get the same bits of others."""
    each = torch.arange(4096, device=device).to(dtype) % 64
    total = reducer.all_reduce(each + rank)
    found = reducer.all_reduce(torch.randn(4096, device=device, dtype=dtype) * (rank + 1.3))
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    deadline = time.monotonic() + _ANSWERS_WITHIN_S
    while not arrived.query():  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            raise ConfigError("Symmetric memory between the GPUs does not answer: set all_reduce to nccl.")
        time.sleep(0.001)
    first = found.clone()
    dist.broadcast(first, src=0)
    return torch.equal(total, each * size + sum(range(size))) and torch.equal(found, first)
