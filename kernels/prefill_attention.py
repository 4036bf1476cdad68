"""Causal attention of new tokens over the paged cache, ragged over sequences.

A program computes BLOCK_M rows of one sequence and one KV head. A row is one query head of one token; the query heads
of a KV head stand next to each other (row = token * group + head), so that they share the keys and values they read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.attention_tile import (
    LOG2_E,
    attend_tile,
    check_paged,
    find_tile,
    load_rows,
    padded_head_dim,
    split_head_dim,
)
from limpet.kernels.checks import require
from limpet.kernels.tuned_tables import tuned

SHORT_ROWS = 64  # a chunk of so many rows is not worth a large tile


# Slices of a step's lists begin anywhere: their alignment must not compile the kernel anew while serving.
@triton.jit(
    do_not_specialize=["num_seqs"],
    do_not_specialize_on_alignment=["block_tables_ptr", "cu_q_lens_ptr", "kv_lens_ptr"],
)
def _prefill_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,
    block_tables_ptr,
    cu_q_lens_ptr,
    kv_lens_ptr,
    scale_log2,
    num_seqs,
    q_stride_token,
    q_stride_head,
    k_stride_block,
    k_stride_slot,
    k_stride_head,
    v_stride_block,
    v_stride_slot,
    v_stride_head,
    out_stride_token,
    out_stride_head,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows of a sequence first
    kv_head = tl.program_id(1)
    seq, first_row = find_tile(cu_q_lens_ptr, num_seqs, tile, GROUP, BLOCK_M)
    if seq < 0:
        return
    q_start = tl.load(cu_q_lens_ptr + seq)
    q_len = tl.load(cu_q_lens_ptr + seq + 1) - q_start
    if first_row >= q_len * GROUP:
        return
    kv_len = tl.load(kv_lens_ptr + seq)
    context_len = kv_len - q_len
    rows = first_row + tl.arange(0, BLOCK_M)
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    valid = tokens < q_len
    q_rows = (q_start + tokens).to(tl.int64) * q_stride_token + heads * q_stride_head
    q_main = load_rows(q_ptr, q_rows, valid, min(HEAD_DIM_QK, D_MAIN), D_MAIN, True)
    q_rest = q_main
    if D_REST > 0:
        q_rest = load_rows(q_ptr + D_MAIN, q_rows, valid, HEAD_DIM_QK - D_MAIN, D_REST, True)

    k_ptr = k_cache_ptr + kv_head * k_stride_head
    v_ptr = v_cache_ptr + kv_head * v_stride_head
    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    num_visible = context_len + tokens + 1
    all_visible = (context_len + first_row // GROUP + 1) // BLOCK_N * BLOCK_N  # whole tiles that every row sees
    end = min(kv_len, context_len + (first_row + BLOCK_M - 1) // GROUP + 1)
    acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(0, all_visible, BLOCK_N):
        acc, row_max, row_sum = attend_tile(
            q_main, q_rest, acc, row_max, row_sum, k_ptr, v_ptr, table_ptr, start + tl.arange(0, BLOCK_N), kv_len,
            num_visible, scale_log2, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
            HEAD_DIM_QK, HEAD_DIM_V, D_MAIN, D_REST, BLOCK_V, BLOCK_SIZE, False,
        )  # fmt: skip
    for start in range(all_visible, end, BLOCK_N):
        acc, row_max, row_sum = attend_tile(
            q_main, q_rest, acc, row_max, row_sum, k_ptr, v_ptr, table_ptr, start + tl.arange(0, BLOCK_N), kv_len,
            num_visible, scale_log2, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
            HEAD_DIM_QK, HEAD_DIM_V, D_MAIN, D_REST, BLOCK_V, BLOCK_SIZE, True,
        )  # fmt: skip

    columns = tl.arange(0, BLOCK_V)
    out_rows = (q_start + tokens).to(tl.int64) * out_stride_token + heads * out_stride_head
    y = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    mask = valid[:, None] & (columns < HEAD_DIM_V)[None, :]
    tl.store(out_ptr + out_rows[:, None] + columns[None, :], y, mask=mask)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_q_lens: Tensor,
    kv_lens: Tensor,
    max_q_len: int,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last tokens of each sequence over its cached positions, their own included.

    q [num_tokens, num_heads, head_dim_qk], sequence after sequence: sequence i has the tokens cu_q_lens[i] …
    cu_q_lens[i + 1] - 1, at most `max_q_len` of them, which are the last of its kv_lens[i] positions; tokens that no
    sequence has are left out. block_tables
    [num_seqs, max_blocks], cu_q_lens [num_seqs + 1] and kv_lens [num_seqs] are int32; scale is positive. Returns
    [num_tokens, num_heads, head_dim_v].
    """
    num_seqs, num_kv_heads, head_dim_v = kv_lens.shape[0], k_cache.shape[2], v_cache.shape[3]
    out = q.new_empty(q.shape[0], q.shape[1], head_dim_v) if out is None else out
    check_paged(q, k_cache, v_cache, block_tables, out)
    require(block_tables.shape[0] == num_seqs and cu_q_lens.shape == (num_seqs + 1,), "every sequence has its lengths")
    group = q.shape[1] // num_kv_heads
    d_main, d_rest = split_head_dim(q.shape[2])
    block_m, block_n, num_warps, num_stages = pick_tile(q.shape[2], q.element_size(), max_q_len * group, q.device)
    _prefill_attention_kernel[(q.shape[0] * group // block_m + num_seqs, num_kv_heads)](
        q,
        k_cache,
        v_cache,
        out,
        block_tables,
        cu_q_lens,
        kv_lens,
        scale * LOG2_E,
        num_seqs,
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
        GROUP=group,
        HEAD_DIM_QK=q.shape[2],
        HEAD_DIM_V=head_dim_v,
        D_MAIN=d_main,
        D_REST=d_rest,
        BLOCK_V=padded_head_dim(head_dim_v),
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


def pick_tile(head_dim: int, element_size: int, max_rows: int, device: torch.device) -> tuple[int, ...]:
    """BLOCK_M, BLOCK_N, warps and pipeline stages, for at most so many rows of a sequence."""
    if measured := tuned("prefill_attention", tile_key(head_dim, element_size, max_rows), device):
        return measured
    if element_size > 2:  # float32, without tensor cores
        return 32, 32, 4, 1
    if head_dim > 256:
        return 64, 32, 8, 2
    if head_dim > 128 or max_rows <= SHORT_ROWS:
        return 64, 64, 4, 2
    return 128, 64, 8, 3


def tile_key(head_dim: int, element_size: int, max_rows: int) -> str:
    return f"head_dim {head_dim}, {element_size} bytes, {'short' if max_rows <= SHORT_ROWS else 'long'}"
