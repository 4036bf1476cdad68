"""What both attention kernels share: one tile of cached positions, attended with a running softmax.

Milakov and Gimelshein 2018: with running maximum m, sum l and weighted values a over the tiles so far, a tile with
scores s gives m' = max(m, max s), l' = l 2^(m - m') + sum 2^(s - m'), a' = a 2^(m - m') + 2^(s - m') V; the result is
a / l. Scores are in units of log 2.

A head of a size that is no power of two is computed as a power of two and a rest (192 as 128 + 64, 576 as 512 + 64):
blocks must be powers of two, and 256 or 1024 columns would be mostly padding.
"""

import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.checks import require

LOG2_E = 1.4426950408889634
MIN_DOT_SIZE = 16  # the tensor cores' smallest tile


@triton.jit
def load_rows(ptr, row_offsets, valid, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Columns 0 … SIZE - 1 of some rows as [rows, BLOCK]; zero where masked or past SIZE."""
    columns = tl.arange(0, BLOCK)
    ptrs = ptr + row_offsets[:, None] + columns[None, :]
    if MASKED:
        return tl.load(ptrs, mask=valid[:, None] & (columns < SIZE)[None, :], other=0.0)
    if BLOCK > SIZE:
        return tl.load(ptrs, mask=(columns < SIZE)[None, :], other=0.0)
    return tl.load(ptrs)


@triton.jit
def find_tile(cu_q_lens_ptr, num_seqs, tile, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sequence and its first row of a step's tile number `tile`; sequence -1, or a row past its last, is none.

    The tiles of sequence i begin at number cu_q_lens[i] * GROUP // BLOCK_M + i, which leaves each enough of them. So a
    grid of num_tokens * GROUP // BLOCK_M + num_seqs tiles holds any step of that size.
    """
    seq = -1
    for first in range(0, num_seqs, 64):
        index = first + tl.arange(0, 64)
        starts = tl.load(cu_q_lens_ptr + index, mask=index < num_seqs, other=0) * GROUP // BLOCK_M + index
        seq += tl.sum(((starts <= tile) & (index < num_seqs)).to(tl.int32), axis=0)
    start = tl.load(cu_q_lens_ptr + seq, mask=seq >= 0, other=0) * GROUP // BLOCK_M + seq
    return seq, (tile - start) * BLOCK_M


@triton.jit
def attend_tile(
    q_main,  # [rows, D_MAIN]
    q_rest,  # [rows, D_REST], anything if D_REST is 0
    acc,  # [rows, BLOCK_V] float32
    row_max,  # [rows]
    row_sum,  # [rows]
    k_ptr,  # of the KV head
    v_ptr,
    table_ptr,  # of the sequence
    positions,  # [BLOCK_N]
    num_positions,  # positions at and past it may not be read
    num_visible,  # [rows] positions that each row attends to
    scale_log2,
    k_stride_block,
    k_stride_slot,
    v_stride_block,
    v_stride_slot,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,  # False: all positions of the tile are visible to all rows
):
    valid = positions < num_positions
    if MASKED:
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
    else:
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE).to(tl.int64)
    slots = positions % BLOCK_SIZE
    k_rows = blocks * k_stride_block + slots * k_stride_slot
    k_main = load_rows(k_ptr, k_rows, valid, min(HEAD_DIM_QK, D_MAIN), D_MAIN, MASKED)
    scores = tl.dot(q_main, tl.trans(k_main), input_precision="ieee")
    if D_REST > 0:
        k_rest = load_rows(k_ptr + D_MAIN, k_rows, valid, HEAD_DIM_QK - D_MAIN, D_REST, MASKED)
        scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
    if MASKED:
        scores = tl.where(positions[None, :] < num_visible[:, None], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_max[:, None])
    shrink = tl.exp2(row_max - new_max)
    row_sum = row_sum * shrink + tl.sum(weights, axis=1)
    v_rows = blocks * v_stride_block + slots * v_stride_slot
    v = load_rows(v_ptr, v_rows, valid, HEAD_DIM_V, BLOCK_V, MASKED)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_max, row_sum


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """A power of two and the power of two that covers the rest (0: none) for head_dim columns."""
    if head_dim <= MIN_DOT_SIZE:
        return MIN_DOT_SIZE, 0
    main = 1 << (head_dim.bit_length() - 1)
    rest = head_dim - main
    return main, padded_head_dim(rest) if rest else 0


def padded_head_dim(head_dim: int) -> int:
    padded: int = triton.next_power_of_2(head_dim)
    return max(padded, MIN_DOT_SIZE)


def check_paged(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, out: Tensor) -> None:
    """Raise ValueError unless the arguments of a paged attention fit together."""
    require(k_cache.shape[:3] == v_cache.shape[:3], "caches are [num_blocks, block_size, num_kv_heads, head_dim]")
    require(q.shape[2] == k_cache.shape[3], "q and k_cache have the same head_dim")
    require(q.shape[1] % k_cache.shape[2] == 0, "num_heads is a multiple of num_kv_heads")
    require(out.shape == (q.shape[0], q.shape[1], v_cache.shape[3]), "out is [tokens of q, num_heads, head_dim_v]")
    require(all(x.stride(-1) == 1 for x in (q, k_cache, v_cache, out, block_tables)), "rows are contiguous")
