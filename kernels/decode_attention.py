"""Attention of one new token per sequence over the paged cache, long sequences split over several programs.

A program computes the query heads of one KV head (at most MAX_HEADS of them) over one split of the sequence. With one
split it writes the output; else it leaves its normalised output o_i and the logarithm (base 2) of its softmax's
denominator e_i, and a second kernel merges (merge_splits.py).

The grid depends on shapes alone, never on lengths, so a captured CUDA graph stays right: each program finds its split
from the sequence's length, and one that finds nothing leaves e_i = minus infinity.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.attention_tile import LOG2_E, attend_tile, check_paged, load_rows, padded_head_dim, split_head_dim
from limpet.kernels.checks import require
from limpet.kernels.devices import num_multiprocessors
from limpet.kernels.merge_splits import merge_splits
from limpet.kernels.tuned_tables import tuned

MAX_HEADS = 64
MAX_SPLITS = 64
MIN_SPLIT_LEN = 128  # positions
PROGRAMS_PER_MULTIPROCESSOR = 4


# Slices of a step's lists begin anywhere: their alignment must not compile the kernel anew while serving.
@triton.jit(do_not_specialize_on_alignment=["block_tables_ptr", "kv_lens_ptr"])
def _decode_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,  # of the output, or of the splits' outputs
    lse_ptr,
    block_tables_ptr,
    kv_lens_ptr,
    scale_log2,
    q_stride_seq,
    q_stride_head,
    k_stride_block,
    k_stride_slot,
    k_stride_head,
    v_stride_block,
    v_stride_slot,
    v_stride_head,
    out_stride_seq,
    out_stride_head,
    table_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    seq = tl.program_id(1).to(tl.int64)
    kv_head = tl.program_id(0) // tl.cdiv(GROUP, BLOCK_HEADS)  # neighbours read neighbouring memory
    split, num_splits = tl.program_id(2), tl.num_programs(2)
    in_group = tl.program_id(0) % tl.cdiv(GROUP, BLOCK_HEADS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    valid = in_group < GROUP
    heads = kv_head * GROUP + in_group
    kv_len = tl.load(kv_lens_ptr + seq)
    split_len = tl.cdiv(tl.cdiv(kv_len, BLOCK_N), num_splits) * BLOCK_N
    start = split * split_len
    end = min(start + split_len, kv_len)
    partial_rows = (seq * NUM_HEADS + heads) * num_splits + split
    if IS_SPLIT:  # noqa: SIM102 - decided when compiling: there is no lse_ptr else
        if start >= end:
            tl.store(lse_ptr + partial_rows, float("-inf"), mask=valid)
            return

    q_rows = seq * q_stride_seq + heads * q_stride_head
    q_main = load_rows(q_ptr, q_rows, valid, min(HEAD_DIM_QK, D_MAIN), D_MAIN, True)
    q_rest = q_main
    if D_REST > 0:
        q_rest = load_rows(q_ptr + D_MAIN, q_rows, valid, HEAD_DIM_QK - D_MAIN, D_REST, True)
    k_ptr = k_cache_ptr + kv_head * k_stride_head
    v_ptr = v_cache_ptr + kv_head * v_stride_head
    table_ptr = block_tables_ptr + seq * table_stride
    num_visible = tl.full([BLOCK_HEADS], 0, dtype=tl.int32) + end
    acc = tl.zeros([BLOCK_HEADS, BLOCK_V], dtype=tl.float32)
    row_max = tl.full([BLOCK_HEADS], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_HEADS], dtype=tl.float32)
    for first in range(start, end, BLOCK_N):
        acc, row_max, row_sum = attend_tile(
            q_main, q_rest, acc, row_max, row_sum, k_ptr, v_ptr, table_ptr, first + tl.arange(0, BLOCK_N), end,
            num_visible, scale_log2, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
            HEAD_DIM_QK, HEAD_DIM_V, D_MAIN, D_REST, BLOCK_V, BLOCK_SIZE, True,
        )  # fmt: skip

    columns = tl.arange(0, BLOCK_V)
    mask = valid[:, None] & (columns < HEAD_DIM_V)[None, :]
    y = acc / row_sum[:, None]
    if IS_SPLIT:
        tl.store(lse_ptr + partial_rows, row_max + tl.log2(row_sum), mask=valid)
        tl.store(out_ptr + (partial_rows * HEAD_DIM_V)[:, None] + columns[None, :], y, mask=mask)
    else:
        out_rows = seq * out_stride_seq + heads * out_stride_head
        tl.store(out_ptr + out_rows[:, None] + columns[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one new token per sequence over its cached positions, its own included.

    q [num_seqs, num_heads, head_dim_qk], block_tables [num_seqs, max_blocks] and kv_lens [num_seqs] (at least 1) in
    int32; scale is positive. Returns [num_seqs, num_heads, head_dim_v].
    """
    num_seqs, num_heads, num_kv_heads = q.shape[0], q.shape[1], k_cache.shape[2]
    out = q.new_empty(num_seqs, num_heads, v_cache.shape[3]) if out is None else out
    check_paged(q, k_cache, v_cache, block_tables, out)
    require(block_tables.shape[0] == num_seqs == kv_lens.shape[0], "every sequence has its length and its blocks")
    block_heads = pick_block_heads(num_heads // num_kv_heads)
    num_programs = num_seqs * num_kv_heads * triton.cdiv(num_heads // num_kv_heads, block_heads)
    max_kv_len = block_tables.shape[1] * k_cache.shape[1]
    num_splits = pick_num_splits(num_programs, max_kv_len, num_multiprocessors(q.device))
    if num_splits == 1:
        _launch(q, k_cache, v_cache, block_tables, kv_lens, scale, 1, out, None)
        return out
    partial = q.new_empty((num_seqs, num_heads, num_splits, out.shape[2]), dtype=torch.float32)
    lse = q.new_empty((num_seqs, num_heads, num_splits), dtype=torch.float32)
    _launch(q, k_cache, v_cache, block_tables, kv_lens, scale, num_splits, partial, lse)
    merge_splits(partial, lse, out)
    return out


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    scale: float,
    num_splits: int,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    num_seqs, num_heads, head_dim = q.shape
    group = num_heads // k_cache.shape[2]
    block_heads = pick_block_heads(group)
    block_n, num_warps, num_stages = pick_tile(head_dim, q.element_size(), block_heads, q.device)
    d_main, d_rest = split_head_dim(head_dim)
    _decode_attention_kernel[(k_cache.shape[2] * triton.cdiv(group, block_heads), num_seqs, num_splits)](
        q,
        k_cache,
        v_cache,
        out,
        lse,
        block_tables,
        kv_lens,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        out.stride(0),
        out.stride(1),
        block_tables.stride(0),
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM_QK=head_dim,
        HEAD_DIM_V=v_cache.shape[3],
        D_MAIN=d_main,
        D_REST=d_rest,
        BLOCK_V=padded_head_dim(v_cache.shape[3]),
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_HEADS=block_heads,
        BLOCK_N=block_n,
        IS_SPLIT=lse is not None,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def pick_block_heads(group: int) -> int:
    """Query heads of a program: the tensor cores' smallest tile, or as many as share the KV head."""
    return min(padded_head_dim(group), MAX_HEADS)


def pick_num_splits(num_programs: int, max_kv_len: int, num_multiprocessors: int) -> int:
    """Splits of a sequence: as many as fill the device when one split each would leave it idle.

    `num_programs` run without splits, `max_kv_len` bounds the lengths.
    """
    wanted = triton.cdiv(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors, num_programs)
    return int(max(1, min(wanted, triton.cdiv(max_kv_len, MIN_SPLIT_LEN), MAX_SPLITS)))


def pick_tile(head_dim: int, element_size: int, block_heads: int, device: torch.device) -> tuple[int, ...]:
    """BLOCK_N, warps and pipeline stages."""
    if measured := tuned("decode_attention", tile_key(head_dim, element_size, block_heads), device):
        return measured
    if element_size > 2:  # float32, without tensor cores
        return 32, 4, 1
    if head_dim > 256:
        return (32, 8, 2) if block_heads > 16 else (32, 4, 2)
    return 64, 4, 3


def tile_key(head_dim: int, element_size: int, block_heads: int) -> str:
    return f"head_dim {head_dim}, {element_size} bytes, {block_heads} heads"
