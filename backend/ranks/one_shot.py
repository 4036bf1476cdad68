"""Sums of hidden states between GPUs of one machine, and the norm after them, in one kernel (kernels/sum_and_norm.py).

The ranks' mailboxes lie in symmetric memory, which all of them have mapped; NVLink multicast is not used.
"""

import logging
import time

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from limpet.backend.config import ConfigError
from limpet.kernels.sum_and_norm import MAX_PROGRAMS, Mailboxes, sum_and_norm

MAX_BYTES = {2: 16 << 20, 4: 4 << 20, 8: 1 << 20}  # by ranks, each sends to all others: past it NCCL is quicker
_CHECKED_ROWS = (1, 3, 2 * MAX_PROGRAMS + 1, 1)
_CHECKED_SIZE = 4096
_ANSWERS_WITHIN_S = 20.0

logger = logging.getLogger(__name__)


class OneShotSum:
    """For tensors of `dtype` up to MAX_BYTES; to be made by all ranks at once, before anything is captured.

    Raises RuntimeError where the GPUs do not reach each other's memory.
    """

    def __init__(self, rank: int, size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.max_bytes = MAX_BYTES[size]
        self._dtype = dtype
        capacity = self.max_bytes // dtype.itemsize
        self._slots = symmetric_memory.empty(2 * size * capacity, dtype=dtype, device=device)
        self._flags = symmetric_memory.empty(size * MAX_PROGRAMS, dtype=torch.int32, device=device).zero_()
        self._mailboxes = Mailboxes(
            rank,
            size,
            capacity,
            _addresses(self._slots, device),
            _addresses(self._flags, device),
            torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device),
        )
        torch.cuda.synchronize(device)
        dist.barrier()  # nobody raises a flag before it is 0

    def takes(self, x: Tensor) -> bool:
        return x.dtype == self._dtype and 0 < x.nbytes <= self.max_bytes

    def add_and_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the sum of all ranks' `x` to `residual` in place; returns its norm."""
        return sum_and_norm(x, residual, weight, eps, self._mailboxes)


def _addresses(tensor: Tensor, device: torch.device) -> Tensor:
    """Of all ranks' tensors like this one, as this rank has mapped them."""
    group = dist.group.WORLD
    assert group is not None
    handle = symmetric_memory.rendezvous(tensor, group.group_name)
    return torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)


def open_one_shot(rank: int, size: int, device: torch.device, dtype: torch.dtype) -> OneShotSum | None:
    """What adds if it gives every rank the right sum, else None on all of them, and the log says why.

    Raises ConfigError if it gives none in time: the GPU then waits for ever.
    """
    if size not in MAX_BYTES:
        return None
    one_shot: OneShotSum | None = None
    try:
        one_shot = OneShotSum(rank, size, device, dtype)
        is_right = all(_check(one_shot, rows, rank, size, device, dtype) for rows in _CHECKED_ROWS)
    except RuntimeError as error:
        logger.warning("All-reduce through NCCL alone: %s", str(error).splitlines()[0])
        is_right = False
    votes = torch.tensor([int(is_right)], device=device)
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return one_shot if votes.item() else None


def _check(one_shot: OneShotSum, rows: int, rank: int, size: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether whole numbers add up, and all ranks get the same bits of others."""
    places = torch.arange(rows * _CHECKED_SIZE, device=device).view(rows, -1)
    weight = torch.ones(_CHECKED_SIZE, dtype=dtype, device=device)
    each = (places % 16).to(dtype)
    total, found = torch.zeros_like(each), torch.zeros_like(each)
    one_shot.add_and_norm(each + rank, total, weight, 1e-5)
    normed = one_shot.add_and_norm(torch.randn_like(each) * (rank + 1.3), found, weight, 1e-5)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    deadline = time.monotonic() + _ANSWERS_WITHIN_S
    while not arrived.query():  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            raise ConfigError("Symmetric memory between the GPUs does not answer: set all_reduce to nccl.")
        time.sleep(0.001)
    firsts = torch.stack((found, normed))
    dist.broadcast(firsts, src=0)
    return torch.equal(total, each * size + sum(range(size))) and torch.equal(torch.stack((found, normed)), firsts)
