"""Lays the choices of all tokens out by expert, in blocks of rows that one program multiplies with one expert.

An expert's choices fill as many blocks as they need; the last of them may be partly empty. The number of blocks is
bounded by shapes alone, so that a captured CUDA graph stays right: blocks past the last used one have no rows.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.expert_routing import Routing

PER_PROGRAM = 16  # choices, and blocks: each is compared with all experts


class ExpertBlocks(NamedTuple):
    """Blocks of rows; a row is a choice: token * num_choices + choice."""

    rows: Tensor  # [num_blocks * block_rows] int32; those past a block's count are not set
    experts: Tensor  # [num_blocks] int32, the expert of each block
    counts: Tensor  # [num_blocks] int32, rows of each block
    block_rows: int


@triton.jit
def _pick(values, experts, chosen):
    """values[chosen] for values [1, BLOCK_EXPERTS] and chosen [PER_PROGRAM]."""
    return tl.sum(tl.where(experts == chosen[:, None], values, 0), axis=1)


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _lay_out_kernel(
    ids_ptr,
    ranks_ptr,
    expert_counts_ptr,
    rows_ptr,
    experts_ptr,
    counts_ptr,
    num_rows,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
):
    experts = tl.arange(0, BLOCK_EXPERTS)
    expert_counts = tl.load(expert_counts_ptr + experts, mask=experts < NUM_EXPERTS, other=0)
    blocks_of = (expert_counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    ends = tl.cumsum(blocks_of, axis=0)
    starts = (ends - blocks_of)[None, :]
    ends, expert_counts, experts = ends[None, :], expert_counts[None, :], experts[None, :]

    each = tl.program_id(0) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    valid = each < num_rows
    ids = tl.load(ids_ptr + each, mask=valid, other=0)
    valid = valid & (ids < NUM_EXPERTS)  # others have their weights elsewhere
    ranks = tl.load(ranks_ptr + each, mask=valid, other=0)
    tl.store(rows_ptr + _pick(starts, experts, ids) * BLOCK_ROWS + ranks, each, mask=valid)

    num_before = tl.sum(tl.where((ends <= each[:, None]) & (experts < NUM_EXPERTS), 1, 0), axis=1)
    left = _pick(expert_counts, experts, num_before) - (each - _pick(starts, experts, num_before)) * BLOCK_ROWS
    counts = tl.where(num_before < NUM_EXPERTS, tl.minimum(left, BLOCK_ROWS), 0)
    tl.store(experts_ptr + each, num_before, mask=each < num_blocks)
    tl.store(counts_ptr + each, counts, mask=each < num_blocks)


def lay_out(routing: Routing, block_rows: int) -> ExpertBlocks:
    """Blocks of at most `block_rows` rows each, one expert's choices together."""
    ids, num_experts = routing.ids, routing.counts.shape[0]
    num_rows = ids.numel()
    num_blocks = bound_blocks(num_rows, num_experts, block_rows)
    rows = torch.empty(num_blocks * block_rows, dtype=torch.int32, device=ids.device)
    experts, counts = (torch.empty(num_blocks, dtype=torch.int32, device=ids.device) for _ in range(2))
    _lay_out_kernel[(triton.cdiv(max(num_rows, num_blocks), PER_PROGRAM),)](
        ids,
        routing.ranks,
        routing.counts,
        rows,
        experts,
        counts,
        num_rows,
        num_blocks,
        NUM_EXPERTS=num_experts,
        BLOCK_EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK_ROWS=block_rows,
        PER_PROGRAM=PER_PROGRAM,
        num_warps=2,
    )
    return ExpertBlocks(rows, experts, counts, block_rows)


def one_token_blocks(routing: Routing, block_rows: int) -> ExpertBlocks:
    """The same for a single token whose experts are all here: a block for each choice, and nothing to launch."""
    rows, counts = _one_row_each(routing.ids.numel(), block_rows, routing.ids.device)
    return ExpertBlocks(rows, routing.ids.flatten(), counts, block_rows)


@cache
def _one_row_each(num_blocks: int, block_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and counts of blocks that hold one row each, in order."""
    each = torch.arange(num_blocks, dtype=torch.int32, device=device)
    return each.repeat_interleave(block_rows), torch.ones_like(each)


def bound_blocks(num_rows: int, num_experts: int, block_rows: int) -> int:
    """The most blocks that so many rows can fill: all experts but one have a block that holds a single row."""
    num_used = min(num_rows, num_experts)
    return num_used + (num_rows - num_used) // block_rows
