"""y = x W^T (+ b): our own product where its order of additions matters, or where it was measured to be quicker.

The inputs are cut into segments. A segment is summed tile by tile on the tensor cores, then the segments' sums are
added in their order. Where the outputs alone would leave the device idle (few rows), each segment has a program of its
own, and the last of them to end adds up; else one program goes through all segments. Both give the same bits, so with
segments that depend on the weight's shape alone a row's result depends on that row alone, in whatever company.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.checks import require
from limpet.kernels.tuned_tables import tuned

ROW_CLASSES = (1, 16, 32, 64)  # rows that a table's key stands for, with those between it and the one before
WANTED_PROGRAMS = 264  # two for each multiprocessor of a large GPU; a constant, since it decides the order of additions
MIN_SEGMENT, MAX_SEGMENTS = 512, 8
MAX_TILES = 1 << 16  # of a split launch
GROUP_ROWS = 8  # row tiles that are computed next to each other, so that they find their weights in the L2 cache


class Tile(NamedTuple):
    """Meta-parameters of one launch."""

    block_rows: int
    block_outs: int
    block_ins: int
    num_warps: int
    num_stages: int


@triton.jit
def _sum_segment(
    x_ptr,
    weight_ptr,
    x_rows,  # [BLOCK_ROWS] offsets
    is_row,  # [BLOCK_ROWS] where PARTIAL
    weight_rows,  # [BLOCK_OUTS] offsets
    start,
    end,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTS: tl.constexpr,
    BLOCK_INS: tl.constexpr,
    EVEN: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    acc = tl.zeros([BLOCK_ROWS, BLOCK_OUTS], dtype=tl.float32)
    for first in range(start, end, BLOCK_INS):
        ins = first + tl.arange(0, BLOCK_INS)
        x_ptrs = x_ptr + x_rows[:, None] + ins[None, :]
        weight_ptrs = weight_ptr + weight_rows[:, None] + ins[None, :]
        inside = (ins < end)[None, :]
        if PARTIAL:
            x = tl.load(x_ptrs, mask=is_row[:, None] & inside, other=0.0)
        elif EVEN:
            x = tl.load(x_ptrs)
        else:
            x = tl.load(x_ptrs, mask=inside, other=0.0)
        weight = tl.load(weight_ptrs) if EVEN else tl.load(weight_ptrs, mask=inside, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,  # [num_segments, num_rows, num_outs] float32
    num_arrived_ptr,  # [tiles] int32, zero before and after
    num_rows,
    num_outs,
    num_ins,
    segment_len,
    x_stride,
    weight_stride,
    out_stride,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTS: tl.constexpr,
    BLOCK_INS: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    PARTIAL: tl.constexpr,  # fewer rows than a tile has; reading one of them again and again would crowd the L2 cache
):
    tile, num_row_tiles = tl.program_id(0), tl.cdiv(num_rows, BLOCK_ROWS)
    tiles_of_group = GROUP * tl.cdiv(num_outs, BLOCK_OUTS)
    first_row_tile = tile // tiles_of_group * GROUP
    group_height = min(num_row_tiles - first_row_tile, GROUP)
    row_tile = first_row_tile + tile % tiles_of_group % group_height
    out_tile = tile % tiles_of_group // group_height
    rows = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outs = out_tile * BLOCK_OUTS + tl.arange(0, BLOCK_OUTS)
    x_rows = (rows % num_rows).to(tl.int64) * x_stride  # rows past the last are computed and not stored
    weight_rows = (outs % num_outs).to(tl.int64) * weight_stride
    mask = (rows < num_rows)[:, None] & (outs < num_outs)[None, :]
    num_segments = tl.cdiv(num_ins, segment_len)
    total = tl.zeros([BLOCK_ROWS, BLOCK_OUTS], dtype=tl.float32)
    if IS_SPLIT:
        segment = tl.program_id(1)
        start = segment * segment_len
        acc = _sum_segment(
            x_ptr, weight_ptr, x_rows, rows < num_rows, weight_rows, start, min(start + segment_len, num_ins),
            BLOCK_ROWS, BLOCK_OUTS, BLOCK_INS, EVEN, PARTIAL,
        )  # fmt: skip
        partial_ptrs = partial_ptr + rows.to(tl.int64)[:, None] * num_outs + outs[None, :]
        segment_stride = num_rows.to(tl.int64) * num_outs
        tl.store(partial_ptrs + segment * segment_stride, acc, mask=mask)
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(num_arrived_ptr + tile, 1, sem="acq_rel") < num_segments - 1:
            return
        tl.store(num_arrived_ptr + tile, 0)
        for each in range(0, num_segments):
            total += tl.load(partial_ptrs + each * segment_stride, mask=mask, other=0.0, cache_modifier=".cg")
    else:
        for each in range(0, num_segments):
            start = each * segment_len
            total += _sum_segment(
                x_ptr, weight_ptr, x_rows, rows < num_rows, weight_rows, start, min(start + segment_len, num_ins),
                BLOCK_ROWS, BLOCK_OUTS, BLOCK_INS, EVEN, PARTIAL,
            )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias_ptr + outs, mask=outs < num_outs, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_stride + outs[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fixed_order: bool = False) -> Tensor:
    """x W^T (+ b) for x [num_rows, num_ins], weight [num_outs, num_ins], bias [num_outs]; [num_rows, num_outs].

    With `fixed_order` a row's bits do not depend on the other rows, nor on how many there are. Else it is computed by
    whatever is quickest: cuBLAS, unless a table says that ours is.
    """
    if fixed_order:
        return _linear_in_fixed_order(x, weight, bias)
    measured = pick_few_rows(x, weight)
    if measured is None:
        return F.linear(x, weight, bias)
    *tile, segment_len = measured
    return launch(x, weight, bias, Tile(*tile), segment_len, is_split=segment_len < x.shape[1])


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile, segment_len: int, *, is_split: bool) -> Tensor:
    """The product with these meta-parameters; `segment_len` is a multiple of the tile's `block_ins`."""
    (num_rows, num_ins), num_outs = x.shape, weight.shape[0]
    out = x.new_empty(num_rows, num_outs)
    require(weight.shape == (num_outs, num_ins), "weight is [num_outs, num_ins] for x [num_rows, num_ins]")
    require(bias is None or bias.shape == (num_outs,), "bias is [num_outs]")
    require(x.stride(1) == weight.stride(1) == 1, "rows are contiguous")
    num_tiles = triton.cdiv(num_rows, tile.block_rows) * triton.cdiv(num_outs, tile.block_outs)
    num_segments = triton.cdiv(num_ins, segment_len)
    partial = None
    if is_split:
        require(num_tiles <= MAX_TILES, f"a split product has at most {MAX_TILES} tiles")
        partial = x.new_empty((num_segments, num_rows, num_outs), dtype=torch.float32)
    _linear_kernel[(num_tiles, num_segments if is_split else 1)](
        x,
        weight,
        bias,
        out,
        partial,
        _num_arrived(x.device) if is_split else None,
        num_rows,
        num_outs,
        num_ins,
        segment_len,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        IS_SPLIT=is_split,
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=tile.block_rows,
        BLOCK_OUTS=tile.block_outs,
        BLOCK_INS=tile.block_ins,
        GROUP=GROUP_ROWS,
        EVEN=num_ins % tile.block_ins == 0,
        PARTIAL=num_rows < tile.block_rows,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _linear_in_fixed_order(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    few, many = pick_fixed_order(x.element_size())
    num_tiles = triton.cdiv(x.shape[0], few.block_rows) * triton.cdiv(weight.shape[0], few.block_outs)
    segment_len = pick_segment_len(weight.shape[0], weight.shape[1], few.block_ins)
    if num_tiles < WANTED_PROGRAMS:
        return launch(x, weight, bias, few, segment_len, is_split=segment_len < x.shape[1])
    return launch(x, weight, bias, many, segment_len, is_split=False)


def pick_fixed_order(element_size: int) -> tuple[Tile, Tile]:
    """Tiles for few and for many rows: of the same `block_ins` and the same instructions, so of the same bits."""
    if element_size > 2:  # float32, without tensor cores
        tile = Tile(32, 32, 32, 4, 1)
        return tile, tile
    return Tile(64, 64, 64, 4, 5), Tile(128, 128, 64, 8, 3)


def pick_segment_len(num_outs: int, num_ins: int, block_ins: int) -> int:
    """Inputs of a segment, a multiple of `block_ins`: so many segments that few rows fill a large GPU."""
    num_tiles = triton.cdiv(num_outs, 64)
    wanted = min(WANTED_PROGRAMS // num_tiles, num_ins // MIN_SEGMENT, MAX_SEGMENTS)
    return int(triton.cdiv(triton.cdiv(num_ins, max(wanted, 1)), block_ins) * block_ins)


def pick_few_rows(x: Tensor, weight: Tensor) -> tuple[int, ...] | None:
    """The fields of a tile, and the length of a segment, where ours was measured to be quicker than cuBLAS."""
    if x.shape[0] > ROW_CLASSES[-1] or x.element_size() != 2:
        return None
    return tuned("linear", few_rows_key(x.shape[0], *weight.shape), x.device)


def few_rows_key(num_rows: int, num_outs: int, num_ins: int) -> str:
    return f"{num_outs} x {num_ins}, up to {next(each for each in ROW_CLASSES if num_rows <= each)} rows"


@cache
def _num_arrived(device: torch.device) -> Tensor:
    """How many segments of each tile have ended: zero between launches, which follow one another on one stream."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
