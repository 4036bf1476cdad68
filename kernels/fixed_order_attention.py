"""Attention with one order of additions: a token's result depends on its own query and positions alone.

Positions are cut into pieces of PIECE_LEN. A piece is attended tile by tile with a running softmax
(attention_tile.py), which leaves its maximum m, sum l and weighted values a; pieces (m, l, a) are merged in their order
into (M, L, A): M' = max(M, m), L' = L 2^(M - M') + l 2^(m - M'), A' likewise; the result is A / L. Prefill and decode
differ in who does it: one program goes through all pieces of its rows, or, where few decodes would leave the device
idle, several programs share the pieces of a sequence, and a second kernel merges. Both give the same bits: same tile
shapes, no contraction of products and sums, and positions that a row does not see add exact zeros.
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
from limpet.kernels.devices import num_multiprocessors

PIECE_LEN = 512  # positions
PROGRAMS_PER_MULTIPROCESSOR = 2


@triton.jit
def _merge(total, row_max, row_sum, piece, piece_max, piece_sum):
    new_max = tl.maximum(row_max, piece_max)
    shrink, piece_shrink = tl.exp2(row_max - new_max), tl.exp2(piece_max - new_max)
    total = total * shrink[:, None] + piece * piece_shrink[:, None]
    return total, new_max, row_sum * shrink + piece_sum * piece_shrink


# Slices of a step's lists begin anywhere: their alignment must not compile the kernel anew while serving.
@triton.jit(
    do_not_specialize=["num_seqs"],
    do_not_specialize_on_alignment=["block_tables_ptr", "cu_q_lens_ptr", "kv_lens_ptr"],
)
def _attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    out_ptr,  # of the output, or of the pieces' weighted values
    piece_max_ptr,
    piece_sum_ptr,
    block_tables_ptr,
    cu_q_lens_ptr,  # None: one token a sequence
    kv_lens_ptr,
    scale_log2,
    num_seqs,
    max_pieces,
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
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    D_MAIN: tl.constexpr,
    D_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr,
    NUM_SHARES: tl.constexpr,  # programs that share the pieces of a sequence; 1: no second kernel
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows of a sequence first
    kv_head = tl.program_id(1)
    seq, share = tl.program_id(2) // NUM_SHARES, tl.program_id(2) % NUM_SHARES
    first_row, q_start, q_len = tile * BLOCK_M, seq, 1
    if cu_q_lens_ptr is not None:
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
    columns = tl.arange(0, BLOCK_V)
    out_mask = valid[:, None] & (columns < HEAD_DIM_V)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    total_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for piece in range(share, tl.cdiv(end, PIECE), NUM_SHARES):
        start, piece_end = piece * PIECE, min(piece * PIECE + PIECE, end)
        all_visible_end = max(min(all_visible, piece_end), start)
        acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        for first in range(start, all_visible_end, BLOCK_N):
            acc, row_max, row_sum = attend_tile(
                q_main, q_rest, acc, row_max, row_sum, k_ptr, v_ptr, table_ptr, first + tl.arange(0, BLOCK_N), kv_len,
                num_visible, scale_log2, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
                HEAD_DIM_QK, HEAD_DIM_V, D_MAIN, D_REST, BLOCK_V, BLOCK_SIZE, False,
            )  # fmt: skip
        for first in range(all_visible_end, piece_end, BLOCK_N):
            acc, row_max, row_sum = attend_tile(
                q_main, q_rest, acc, row_max, row_sum, k_ptr, v_ptr, table_ptr, first + tl.arange(0, BLOCK_N), kv_len,
                num_visible, scale_log2, k_stride_block, k_stride_slot, v_stride_block, v_stride_slot,
                HEAD_DIM_QK, HEAD_DIM_V, D_MAIN, D_REST, BLOCK_V, BLOCK_SIZE, True,
            )  # fmt: skip
        if NUM_SHARES > 1:
            partial_rows = (seq.to(tl.int64) * NUM_HEADS + heads) * max_pieces + piece
            tl.store(piece_max_ptr + partial_rows, row_max, mask=valid)
            tl.store(piece_sum_ptr + partial_rows, row_sum, mask=valid)
            tl.store(out_ptr + (partial_rows * HEAD_DIM_V)[:, None] + columns[None, :], acc, mask=out_mask)
        else:
            seen = num_visible > start  # else the row sees nothing of the piece, which left it NaN
            merged, merged_max, merged_sum = _merge(total, total_max, total_sum, acc, row_max, row_sum)
            total = tl.where(seen[:, None], merged, total)
            total_max = tl.where(seen, merged_max, total_max)
            total_sum = tl.where(seen, merged_sum, total_sum)
    if NUM_SHARES == 1:
        out_rows = (q_start + tokens).to(tl.int64) * out_stride_token + heads * out_stride_head
        y = (total / total_sum[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_rows[:, None] + columns[None, :], y, mask=out_mask)


@triton.jit
def _merge_pieces_kernel(
    partial_ptr,  # [num_seqs, num_heads, max_pieces, HEAD_DIM_V] float32
    piece_max_ptr,  # [num_seqs, num_heads, max_pieces]
    piece_sum_ptr,
    kv_lens_ptr,
    out_ptr,
    max_pieces,
    out_stride_seq,
    out_stride_head,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PIECE: tl.constexpr,
):
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    one, columns = tl.arange(0, 1), tl.arange(0, BLOCK_V)
    mask = (columns < HEAD_DIM_V)[None, :]
    total = tl.zeros([1, BLOCK_V], dtype=tl.float32)
    total_max = tl.full([1], float("-inf"), dtype=tl.float32)
    total_sum = tl.zeros([1], dtype=tl.float32)
    first = (seq * tl.num_programs(1) + head) * max_pieces
    for piece in range(0, tl.cdiv(tl.load(kv_lens_ptr + seq), PIECE)):
        rows = first + piece + one
        values = tl.load(partial_ptr + (rows * HEAD_DIM_V)[:, None] + columns[None, :], mask=mask, other=0.0)
        piece_max, piece_sum = tl.load(piece_max_ptr + rows), tl.load(piece_sum_ptr + rows)
        total, total_max, total_sum = _merge(total, total_max, total_sum, values, piece_max, piece_sum)
    y = (total / total_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + seq * out_stride_seq + head * out_stride_head + columns[None, :], y, mask=mask)


def fixed_order_prefill_attention(
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
    """`prefill_attention`, with bits that depend on neither the other sequences nor how a prompt is cut into chunks."""
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3]) if out is None else out
    check_paged(q, k_cache, v_cache, block_tables, out)
    require(cu_q_lens.shape == (kv_lens.shape[0] + 1,), "every sequence has its lengths")
    _launch(q, k_cache, v_cache, block_tables, cu_q_lens, kv_lens, scale, 1, out, None)
    return out


def fixed_order_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """`decode_attention`, with the bits of `fixed_order_prefill_attention`."""
    num_seqs, num_heads, head_dim_v = q.shape[0], q.shape[1], v_cache.shape[3]
    out = q.new_empty(num_seqs, num_heads, head_dim_v) if out is None else out
    check_paged(q, k_cache, v_cache, block_tables, out)
    require(block_tables.shape[0] == num_seqs == kv_lens.shape[0], "every sequence has its length and its blocks")
    max_pieces = int(triton.cdiv(block_tables.shape[1] * k_cache.shape[1], PIECE_LEN))
    num_shares = pick_num_shares(num_seqs * k_cache.shape[2], max_pieces, num_multiprocessors(q.device))
    if num_shares == 1:
        _launch(q, k_cache, v_cache, block_tables, None, kv_lens, scale, 1, out, None)
        return out
    partial = q.new_empty((num_seqs, num_heads, max_pieces, head_dim_v), dtype=torch.float32)
    bounds = q.new_empty((2, num_seqs, num_heads, max_pieces), dtype=torch.float32)
    _launch(q, k_cache, v_cache, block_tables, None, kv_lens, scale, num_shares, partial, bounds)
    _merge_pieces_kernel[(num_seqs, num_heads)](
        partial,
        bounds[0],
        bounds[1],
        kv_lens,
        out,
        max_pieces,
        out.stride(0),
        out.stride(1),
        HEAD_DIM_V=head_dim_v,
        BLOCK_V=triton.next_power_of_2(head_dim_v),
        PIECE=PIECE_LEN,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_q_lens: Tensor | None,
    kv_lens: Tensor,
    scale: float,
    num_shares: int,
    out: Tensor,
    bounds: Tensor | None,
) -> None:
    num_heads, head_dim, num_kv_heads = q.shape[1], q.shape[2], k_cache.shape[2]
    group = num_heads // num_kv_heads
    d_main, d_rest = split_head_dim(head_dim)
    block_m, block_n, num_warps, num_stages = pick_tile(head_dim, q.element_size())
    num_seqs = kv_lens.shape[0]
    if cu_q_lens is None:
        grid = triton.cdiv(group, block_m), num_kv_heads, num_seqs * num_shares
    else:
        grid = q.shape[0] * group // block_m + num_seqs, num_kv_heads, 1
    _attention_kernel[grid](
        q,
        k_cache,
        v_cache,
        out,
        bounds[0] if bounds is not None else None,
        bounds[1] if bounds is not None else None,
        block_tables,
        cu_q_lens,
        kv_lens,
        scale * LOG2_E,
        num_seqs,
        out.shape[2] if bounds is not None else 0,
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
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        PIECE=PIECE_LEN,
        NUM_SHARES=num_shares,
        num_warps=num_warps,
        num_stages=num_stages,
        enable_fp_fusion=False,
    )


def pick_num_shares(num_programs: int, max_pieces: int, num_multiprocessors: int) -> int:
    """Programs for the pieces of a sequence, a power of two: as many as fill the device, where one each would not."""
    wanted = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // num_programs
    return 1 << max(0, min(wanted, max_pieces).bit_length() - 1)


def pick_tile(head_dim: int, element_size: int) -> tuple[int, int, int, int]:
    """Rows, positions, warps and pipeline stages: the same whatever the load."""
    if element_size > 2:  # float32, without tensor cores
        return 32, 32, 4, 1
    if head_dim > 256:  # the accumulators of more rows would not fit into registers
        return 16, 32, 4, 2
    return (64, 64, 4, 2) if head_dim <= 128 else (64, 32, 4, 2)
