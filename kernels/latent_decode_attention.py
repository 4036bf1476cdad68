"""Attention of one new token per sequence over cached latent rows, as latent attention (MLA) decodes.

All query heads share one row a position: its `rank + rope` columns are the key, the first `rank` of them the value too,
so that a tile of rows is loaded once for both products.

A program computes some heads over one split of the sequence. The grid depends on shapes alone, never on lengths, so a
captured CUDA graph stays right: each program finds its split from the sequence's length, and one that finds nothing
ends. A sequence of a single split is written at once; else merge_splits.py makes one output of the splits'.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.attention_tile import LOG2_E, load_rows, padded_head_dim
from limpet.kernels.checks import require
from limpet.kernels.devices import num_multiprocessors
from limpet.kernels.merge_splits import merge_splits
from limpet.kernels.tuned_tables import tuned

MAX_HEADS = 64  # of a program: their sums, 512 each, fill its registers
MAX_SPLITS = 64
MIN_SPLIT_LEN, MAX_CROWDING = 32, 16  # positions
PROGRAMS_PER_MULTIPROCESSOR = 8  # of which most find nothing where lengths are far below their bound


# Slices of a step's lists begin anywhere: their alignment must not compile the kernel anew while serving.
@triton.jit(do_not_specialize=["min_split_len"], do_not_specialize_on_alignment=["block_tables_ptr", "kv_lens_ptr"])
def _latent_decode_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    partial_ptr,  # [num_seqs, num_heads, num_splits, RANK] float32; None: sequences have one split
    lse_ptr,  # [num_seqs, num_heads, num_splits]
    block_tables_ptr,
    kv_lens_ptr,
    scale_log2,
    min_split_len,
    q_stride_seq,
    q_stride_head,
    cache_stride_block,
    cache_stride_slot,
    out_stride_seq,
    out_stride_head,
    table_stride,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    split, num_splits = tl.program_id(2), tl.num_programs(2)
    valid_heads = heads < NUM_HEADS
    kv_len = tl.load(kv_lens_ptr + seq)
    split_len = max(tl.cdiv(tl.cdiv(kv_len, BLOCK_N), num_splits) * BLOCK_N, min_split_len)
    start = split * split_len
    end = min(start + split_len, kv_len)
    partial_rows = (seq * NUM_HEADS + heads) * num_splits + split
    if partial_ptr is not None:  # noqa: SIM102 - decided when compiling
        if start >= end:
            tl.store(lse_ptr + partial_rows, float("-inf"), mask=valid_heads)
            return

    q_rows = seq * q_stride_seq + heads * q_stride_head
    q_latent = load_rows(q_ptr, q_rows, valid_heads, RANK, BLOCK_RANK, True)
    q_rope = load_rows(q_ptr + RANK, q_rows, valid_heads, ROPE, BLOCK_ROPE, True)
    table_ptr = block_tables_ptr + seq * table_stride
    acc = tl.zeros([BLOCK_HEADS, BLOCK_RANK], dtype=tl.float32)
    head_max = tl.full([BLOCK_HEADS], float("-inf"), dtype=tl.float32)
    head_sum = tl.zeros([BLOCK_HEADS], dtype=tl.float32)
    for first in range(start, end, BLOCK_N):
        positions = first + tl.arange(0, BLOCK_N)
        valid = positions < end
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        rows = blocks * cache_stride_block + positions % BLOCK_SIZE * cache_stride_slot
        latents = load_rows(cache_ptr, rows, valid, RANK, BLOCK_RANK, True)  # [BLOCK_N, BLOCK_RANK]
        ropes = load_rows(cache_ptr + RANK, rows, valid, ROPE, BLOCK_ROPE, True)
        scores = tl.dot(q_latent, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(ropes), scores, input_precision="ieee") * scale_log2
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_max = tl.maximum(head_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        shrink = tl.exp2(head_max - new_max)
        head_sum = head_sum * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(latents.dtype), latents, acc * shrink[:, None], input_precision="ieee")
        head_max = new_max

    columns = tl.arange(0, BLOCK_RANK)
    mask = valid_heads[:, None] & (columns < RANK)[None, :]
    y = acc / head_sum[:, None]
    if partial_ptr is not None:  # noqa: SIM102
        if split_len < kv_len:
            tl.store(lse_ptr + partial_rows, head_max + tl.log2(head_sum), mask=valid_heads)
            tl.store(partial_ptr + (partial_rows * RANK)[:, None] + columns[None, :], y, mask=mask)
            return
    out_rows = seq * out_stride_seq + heads * out_stride_head
    tl.store(out_ptr + out_rows[:, None] + columns[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


def latent_decode_attention(
    q: Tensor,
    latent_cache: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    rank: int,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one new token per sequence, in latent space: keys are whole rows, values their first `rank` columns.

    q [num_seqs, num_heads, rank + rope], latent_cache [num_blocks, block_size, rank + rope], block_tables [num_seqs,
    max_blocks] and kv_lens [num_seqs] (at least 1) in int32; scale is positive. Returns [num_seqs, num_heads, rank].
    """
    num_seqs, num_heads, row_dim = q.shape
    out = q.new_empty(num_seqs, num_heads, rank) if out is None else out
    require(latent_cache.shape[2] == row_dim > rank, "q and latent_cache have rows of [rank + rope]")
    require(out.shape == (num_seqs, num_heads, rank), "out is [num_seqs, num_heads, rank]")
    require(block_tables.shape[0] == num_seqs == kv_lens.shape[0], "every sequence has its length and its blocks")
    require(all(x.stride(-1) == 1 for x in (q, latent_cache, out, block_tables)), "rows are contiguous")
    block_heads = pick_block_heads(num_heads)
    num_programs = num_seqs * triton.cdiv(num_heads, block_heads)
    max_kv_len = block_tables.shape[1] * latent_cache.shape[1]
    num_splits, min_split_len = pick_splits(num_programs, max_kv_len, num_multiprocessors(q.device))
    partial = lse = None
    if num_splits > 1:
        partial = q.new_empty((num_seqs, num_heads, num_splits, rank), dtype=torch.float32)
        lse = q.new_empty((num_seqs, num_heads, num_splits), dtype=torch.float32)
    block_n, num_warps, num_stages = pick_tile(rank, q.element_size(), block_heads, q.device)
    _latent_decode_kernel[(num_seqs, triton.cdiv(num_heads, block_heads), num_splits)](
        q,
        latent_cache,
        out,
        partial,
        lse,
        block_tables,
        kv_lens,
        scale * LOG2_E,
        min_split_len,
        q.stride(0),
        q.stride(1),
        latent_cache.stride(0),
        latent_cache.stride(1),
        out.stride(0),
        out.stride(1),
        block_tables.stride(0),
        NUM_HEADS=num_heads,
        RANK=rank,
        ROPE=row_dim - rank,
        BLOCK_RANK=padded_head_dim(rank),
        BLOCK_ROPE=padded_head_dim(row_dim - rank),
        BLOCK_SIZE=latent_cache.shape[1],
        BLOCK_HEADS=block_heads,
        BLOCK_N=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if partial is not None and lse is not None:
        merge_splits(partial, lse, out, kv_lens, min_split_len)
    return out


def pick_block_heads(num_heads: int) -> int:
    """Query heads of a program: the tensor cores' smallest tile, or as many as there are."""
    return min(padded_head_dim(num_heads), MAX_HEADS)


def pick_splits(num_programs: int, max_kv_len: int, num_multiprocessors: int) -> tuple[int, int]:
    """The most splits of a sequence, and the fewest positions of one.

    Short splits fill the device where few programs run without splits (`num_programs`); where more do, splits are for
    sequences that are much longer than others. `max_kv_len` bounds the lengths.
    """
    wanted = triton.cdiv(PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors, num_programs)
    crowding = min(triton.next_power_of_2(triton.cdiv(8 * num_programs, num_multiprocessors)), MAX_CROWDING)
    min_split_len = MIN_SPLIT_LEN * crowding
    return int(max(1, min(wanted, triton.cdiv(max_kv_len, min_split_len), MAX_SPLITS))), min_split_len


def pick_tile(rank: int, element_size: int, block_heads: int, device: torch.device) -> tuple[int, ...]:
    """BLOCK_N, warps and pipeline stages."""
    if measured := tuned("latent_decode_attention", tile_key(rank, element_size, block_heads), device):
        return measured
    if element_size > 2:  # float32, without tensor cores; 512 columns are 64 KiB a tile of 32
        return (16, 4, 1) if rank > 256 else (32, 4, 1)
    return (64, 8, 2) if block_heads > 16 else (32, 4, 2)


def tile_key(rank: int, element_size: int, block_heads: int) -> str:
    return f"rank {rank}, {element_size} bytes, {block_heads} heads"
