"""The sum of all ranks' hidden states, added to the residual, and the norm of that: one kernel on every rank.

A ring of copies, as NCCL has it, takes longer to begin than a decode step's few hidden states take to travel. Here each
program sends its rows into the other ranks' memory (slots), raises a flag there, waits for theirs and adds what came.
Parts are added in the order of the ranks, so that the sums have the same bits on all of them. Calls take turns between
two sets of slots: a rank that begins a call has seen every other begin the one before, and so end the one before that,
whose slots it may overwrite. Calls are counted on the device, for replays of CUDA graphs to take turns, too.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.checks import require

MAX_PROGRAMS = 128  # all of them run at once on any GPU in question: none waits for one that has no place


@dataclass(frozen=True)
class Mailboxes:
    """Where the ranks leave their parts for each other. Every rank's count of calls must be the same.

    slots and flags [size] int64: addresses of each rank's slots [2, size, capacity] of the hidden states' type, and of
    its flags [size, MAX_PROGRAMS] int32, which begin as 0; calls [MAX_PROGRAMS] int32, this rank's own, begins as 0.
    """

    rank: int
    size: int
    capacity: int  # elements of a slot
    slots: Tensor
    flags: Tensor
    calls: Tensor


@triton.jit(do_not_specialize=["num_rows"])
def _sum_and_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    slots_ptr,
    flags_ptr,
    calls_ptr,
    num_rows,
    size,
    eps,
    capacity,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_FLAGS: tl.constexpr,
):
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK_SIZE)
    mask = columns < size
    dtype = x_ptr.dtype.element_ty
    call = tl.load(calls_ptr + program) + 1
    first_slot = (call & 1) * NUM_RANKS

    for row in range(program, num_rows, num_programs):
        x = tl.load(x_ptr + row * size + columns, mask=mask)
        for step in tl.static_range(1, NUM_RANKS):
            slots = tl.multiple_of(tl.load(slots_ptr + (RANK + step) % NUM_RANKS).to(tl.pointer_type(dtype)), 16)
            tl.store(slots + (first_slot + RANK) * capacity + row * size + columns, x, mask=mask)
    tl.debug_barrier()  # all threads' rows are on their way before the flag is
    for step in tl.static_range(1, NUM_RANKS):
        flags = tl.load(flags_ptr + (RANK + step) % NUM_RANKS).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + RANK * NUM_FLAGS + program, call, sem="release", scope="sys")
    own_flags = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int32))
    for step in tl.static_range(1, NUM_RANKS):
        flag = own_flags + (RANK + step) % NUM_RANKS * NUM_FLAGS + program
        # The other rank may be one call ahead; the difference is right past the largest int32, too.
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - call < 0:
            pass
    tl.debug_barrier()

    own_slots = tl.multiple_of(tl.load(slots_ptr + RANK).to(tl.pointer_type(dtype)), 16)
    for row in range(program, num_rows, num_programs):
        total = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
        for rank in tl.static_range(NUM_RANKS):
            part = x_ptr + row * size if rank == RANK else own_slots + (first_slot + rank) * capacity + row * size
            total += tl.load(part + columns, mask=mask, other=0.0).to(tl.float32)
        residual = residual_ptr + row * size + columns
        total = total.to(dtype).to(tl.float32) + tl.load(residual, mask=mask, other=0.0).to(tl.float32)
        y = total.to(residual_ptr.dtype.element_ty)
        tl.store(residual, y, mask=mask)
        y = y.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(y * y) / size + eps)
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        out = out_ptr + row * size + columns
        tl.store(out, (y * inverse * weight).to(out_ptr.dtype.element_ty), mask=mask)

    tl.store(calls_ptr + program, call)
    if program == 0:
        idle = tl.arange(0, NUM_FLAGS)
        tl.store(calls_ptr + idle, tl.zeros([NUM_FLAGS], dtype=tl.int32) + call, mask=idle >= num_programs)


def sum_and_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, mailboxes: Mailboxes) -> Tensor:
    """Add the sum of all ranks' `x` to `residual` in place; returns its norm, like rms_norm.

    x and residual [num_rows, size], weight [size]; every rank calls it with as many rows. The sum is rounded to the
    type of `x` before it is added, as if it had been stored.
    """
    num_rows, size = x.shape
    require(residual.shape == x.shape and weight.shape == (size,), "x and residual are [num_rows, size], weight [size]")
    require(all(each.is_contiguous() for each in (x, residual, weight)), "they are contiguous")
    require(0 < x.numel() <= mailboxes.capacity, "a slot has room for x")
    out = torch.empty_like(x)
    block_size = triton.next_power_of_2(size)
    _sum_and_norm_kernel[(min(num_rows, MAX_PROGRAMS),)](
        x,
        residual,
        weight,
        out,
        mailboxes.slots,
        mailboxes.flags,
        mailboxes.calls,
        num_rows,
        size,
        eps,
        mailboxes.capacity,
        RANK=mailboxes.rank,
        NUM_RANKS=mailboxes.size,
        BLOCK_SIZE=block_size,
        NUM_FLAGS=MAX_PROGRAMS,
        num_warps=min(max(block_size // 512, 4), 16),
    )
    return out
