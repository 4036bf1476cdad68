"""Products of blocks of rows with the weights of their experts: the two halves of a gated MLP.

A program computes one block's rows (expert_blocks.py) by some outputs. The first half gathers tokens and multiplies
with gate and up rows at once, so that silu(gate) * up never leaves the program; the second multiplies with the down
rows and with the choice's weight. Programs of neighbouring blocks, which mostly share their expert, run next to each
other and find its weights in the L2 cache. A row's sums go through the inputs in one order, whatever its block holds.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.checks import require
from limpet.kernels.expert_blocks import ExpertBlocks

GROUP_BLOCKS = 8


class Tile(NamedTuple):
    """Meta-parameters of a half; its rows are those of the blocks."""

    block_outs: int
    block_ins: int
    num_warps: int
    num_stages: int


@triton.jit
def _program_place(num_blocks, num_out_tiles, GROUP: tl.constexpr):
    """Block and tile of outputs of this program: all tiles of GROUP blocks, then those of the next."""
    place, per_group = tl.program_id(0), GROUP * num_out_tiles
    first_block = place // per_group * GROUP
    height = min(num_blocks - first_block, GROUP)
    return first_block + place % per_group % height, place % per_group // height


@triton.jit
def _load_weights(ptrs, inside, EVEN: tl.constexpr):
    return tl.load(ptrs) if EVEN else tl.load(ptrs, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["num_blocks"])
def _grouped_matmul_kernel(
    x_ptr,
    weight_ptr,
    choice_weights_ptr,  # of the second half
    out_ptr,
    rows_ptr,
    experts_ptr,
    counts_ptr,
    num_blocks,
    num_outs,
    num_ins,
    x_stride,
    out_stride,
    ROWS_PER_X: tl.constexpr,  # choices that share a row of x
    IS_GATED: tl.constexpr,  # the first half: gate rows, then up rows
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTS: tl.constexpr,
    BLOCK_INS: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    block, out_tile = _program_place(num_blocks, tl.cdiv(num_outs, BLOCK_OUTS), GROUP)
    count = tl.load(counts_ptr + block)
    if count == 0:
        return
    expert = tl.load(experts_ptr + block).to(tl.int64)
    in_block, outs = tl.arange(0, BLOCK_ROWS), out_tile * BLOCK_OUTS + tl.arange(0, BLOCK_OUTS)
    valid = in_block < count
    rows = tl.load(rows_ptr + block * BLOCK_ROWS + in_block, mask=valid, other=0)
    x_ptrs = x_ptr + (rows // ROWS_PER_X).to(tl.int64)[:, None] * x_stride
    first_row = expert * num_outs * (2 if IS_GATED else 1)
    weight_ptrs = weight_ptr + (first_row + outs % num_outs)[:, None] * num_ins
    up_ptrs = weight_ptrs + num_outs.to(tl.int64) * num_ins
    acc = tl.zeros([BLOCK_ROWS, BLOCK_OUTS], dtype=tl.float32)
    up = acc
    for first in range(0, num_ins, BLOCK_INS):
        ins = (first + tl.arange(0, BLOCK_INS))[None, :]
        inside = ins < num_ins
        x = tl.load(x_ptrs + ins, mask=valid[:, None] if EVEN else valid[:, None] & inside, other=0.0)
        acc = tl.dot(x, tl.trans(_load_weights(weight_ptrs + ins, inside, EVEN)), acc, input_precision="ieee")
        if IS_GATED:
            up = tl.dot(x, tl.trans(_load_weights(up_ptrs + ins, inside, EVEN)), up, input_precision="ieee")
    if IS_GATED:
        y = acc * tl.sigmoid(acc) * up
    else:
        y = acc * tl.load(choice_weights_ptr + rows, mask=valid, other=0.0)[:, None]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_stride + outs[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (outs < num_outs)[None, :])


def gate_and_up(x: Tensor, weight: Tensor, blocks: ExpertBlocks, num_choices: int, tile: Tile) -> Tensor:
    """silu(gate) * up of each choice, [num_tokens * num_choices, intermediate], for x [num_tokens, hidden].

    weight [num_experts, 2 * intermediate, hidden] = gate rows, then up rows.
    """
    out = x.new_empty(x.shape[0] * num_choices, weight.shape[1] // 2)
    _launch(x, weight, None, blocks, tile, out)
    return out


def weighted_down(x: Tensor, weight: Tensor, choice_weights: Tensor, blocks: ExpertBlocks, tile: Tile) -> Tensor:
    """Each choice's down product times its weight, [num_rows, hidden], for x [num_rows, intermediate].

    weight [num_experts, hidden, intermediate]; choice_weights of num_rows elements in float32.
    """
    require(choice_weights.numel() == x.shape[0] and choice_weights.is_contiguous(), "every choice has its weight")
    out = x.new_empty(x.shape[0], weight.shape[1])
    _launch(x, weight, choice_weights, blocks, tile, out)
    return out


def _launch(
    x: Tensor, weight: Tensor, choice_weights: Tensor | None, blocks: ExpertBlocks, tile: Tile, out: Tensor
) -> None:
    (num_rows, num_outs), num_ins, num_blocks = out.shape, x.shape[1], blocks.counts.shape[0]
    require(weight.shape[2] == num_ins and weight.is_contiguous(), "weight is contiguous, [experts, outs, ins]")
    require(x.stride(1) == 1, "rows are contiguous")
    _grouped_matmul_kernel[(num_blocks * triton.cdiv(num_outs, tile.block_outs),)](
        x,
        weight,
        choice_weights,
        out,
        blocks.rows,
        blocks.experts,
        blocks.counts,
        num_blocks,
        num_outs,
        num_ins,
        x.stride(0),
        out.stride(0),
        ROWS_PER_X=num_rows // x.shape[0],
        IS_GATED=choice_weights is None,
        BLOCK_ROWS=blocks.block_rows,
        BLOCK_OUTS=tile.block_outs,
        BLOCK_INS=tile.block_ins,
        GROUP=GROUP_BLOCKS,
        EVEN=num_ins % tile.block_ins == 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
