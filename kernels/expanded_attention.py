"""Attention of new tokens over keys and values that latent attention (MLA) expanded, ragged over sequences.

A key is its head's own part, `k`, and a rotary part that all heads share, `k_rope`; neither lies in a paged cache.
A program computes BLOCK_M tokens of one sequence and head with a running softmax (attention_tile.py has the formula)
and leaves its log-sum-exp beside the output, so that attention over other keys can be merged with it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.attention_tile import LOG2_E, load_rows, padded_head_dim
from limpet.kernels.checks import require
from limpet.kernels.tuned_tables import tuned


@triton.jit
def _attend(
    q_own,  # [BLOCK_M, BLOCK_OWN]
    q_rope,  # [BLOCK_M, BLOCK_ROPE]
    acc,  # [BLOCK_M, BLOCK_V] float32
    row_max,  # [BLOCK_M]
    row_sum,  # [BLOCK_M]
    k_ptr,  # of the sequence's first key and the head
    k_rope_ptr,
    v_ptr,
    keys,  # [BLOCK_N]
    num_keys,
    num_visible,  # [BLOCK_M] keys that each row attends to
    scale_log2,
    k_stride,
    k_rope_stride,
    v_stride,
    OWN: tl.constexpr,
    ROPE: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MASKED: tl.constexpr,  # False: all keys of the tile are visible to all rows
):
    valid = keys < num_keys
    rows = keys.to(tl.int64)
    k_own = load_rows(k_ptr, rows * k_stride, valid, OWN, BLOCK_OWN, MASKED)
    k_rope = load_rows(k_rope_ptr, rows * k_rope_stride, valid, ROPE, BLOCK_ROPE, MASKED)
    scores = tl.dot(q_own, tl.trans(k_own), input_precision="ieee")
    scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
    if MASKED:
        scores = tl.where(keys[None, :] < num_visible[:, None], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_max[:, None])
    shrink = tl.exp2(row_max - new_max)
    row_sum = row_sum * shrink + tl.sum(weights, axis=1)
    v = load_rows(v_ptr, rows * v_stride, valid, HEAD_DIM_V, BLOCK_V, MASKED)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_max, row_sum


# Slices of a step's lists begin anywhere: their alignment must not compile the kernel anew while serving.
@triton.jit(do_not_specialize_on_alignment=["cu_q_lens_ptr", "cu_kv_lens_ptr"])
def _expanded_attention_kernel(
    q_ptr,
    k_ptr,
    k_rope_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,  # [num_tokens, num_heads]
    cu_q_lens_ptr,
    cu_kv_lens_ptr,
    scale_log2,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    k_rope_stride,
    v_stride_token,
    v_stride_head,
    out_stride_token,
    out_stride_head,
    OWN: tl.constexpr,
    ROPE: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    first_token = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest rows first
    head, seq = tl.program_id(1), tl.program_id(2)
    q_start = tl.load(cu_q_lens_ptr + seq)
    q_len = tl.load(cu_q_lens_ptr + seq + 1) - q_start
    if first_token >= q_len:
        return
    kv_start = tl.load(cu_kv_lens_ptr + seq).to(tl.int64)
    num_keys = (tl.load(cu_kv_lens_ptr + seq + 1) - kv_start).to(tl.int32)
    tokens = first_token + tl.arange(0, BLOCK_M)
    valid = tokens < q_len
    rows = (q_start + tokens).to(tl.int64)
    q_rows = rows * q_stride_token + head * q_stride_head
    q_own = load_rows(q_ptr, q_rows, valid, OWN, BLOCK_OWN, True)
    q_rope = load_rows(q_ptr + OWN, q_rows, valid, ROPE, BLOCK_ROPE, True)
    k_ptr += kv_start * k_stride_token + head * k_stride_head
    k_rope_ptr += kv_start * k_rope_stride
    v_ptr += kv_start * v_stride_token + head * v_stride_head
    if IS_CAUSAL:
        num_visible = tokens + 1
        end = min(num_keys, first_token + BLOCK_M)
        all_visible = (first_token + 1) // BLOCK_N * BLOCK_N  # whole tiles that every row sees
    else:
        num_visible = tl.zeros([BLOCK_M], dtype=tl.int32) + num_keys
        end = num_keys
        all_visible = num_keys // BLOCK_N * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(0, all_visible, BLOCK_N):
        acc, row_max, row_sum = _attend(
            q_own, q_rope, acc, row_max, row_sum, k_ptr, k_rope_ptr, v_ptr, start + tl.arange(0, BLOCK_N), num_keys,
            num_visible, scale_log2, k_stride_token, k_rope_stride, v_stride_token,
            OWN, ROPE, HEAD_DIM_V, BLOCK_OWN, BLOCK_ROPE, BLOCK_V, False,
        )  # fmt: skip
    for start in range(all_visible, end, BLOCK_N):
        acc, row_max, row_sum = _attend(
            q_own, q_rope, acc, row_max, row_sum, k_ptr, k_rope_ptr, v_ptr, start + tl.arange(0, BLOCK_N), num_keys,
            num_visible, scale_log2, k_stride_token, k_rope_stride, v_stride_token,
            OWN, ROPE, HEAD_DIM_V, BLOCK_OWN, BLOCK_ROPE, BLOCK_V, True,
        )  # fmt: skip

    columns = tl.arange(0, BLOCK_V)
    has_keys = row_sum > 0.0
    row_sum = tl.where(has_keys, row_sum, 1.0)
    y = acc / row_sum[:, None]
    mask = valid[:, None] & (columns < HEAD_DIM_V)[None, :]
    out_rows = rows * out_stride_token + head * out_stride_head
    tl.store(out_ptr + out_rows[:, None] + columns[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + rows * tl.num_programs(1) + head, row_max + tl.log2(row_sum), mask=valid)


def expanded_attention(
    q: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
    cu_q_lens: Tensor,
    cu_kv_lens: Tensor,
    max_q_len: int,
    scale: float,
    is_causal: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of new tokens over expanded keys and values, ragged over sequences; returns output and log-sum-exp.

    q [num_tokens, num_heads, nope + rope]; k [num_keys, num_heads, nope], k_rope [num_keys, rope] (the same for all
    heads), v [num_keys, num_heads, head_dim_v]. Sequence i has the tokens cu_q_lens[i] … cu_q_lens[i + 1] - 1, at most
    `max_q_len`, and the keys cu_kv_lens[i] … cu_kv_lens[i + 1] - 1, both int32 [num_seqs + 1]. With `is_causal` it has
    as many keys as tokens and a token sees those up to itself, else it sees all; scale is positive. Log-sum-exp
    [num_tokens, num_heads] in float32 and to base 2; minus infinity, beside an output of zero, where there are no keys.
    """
    num_tokens, num_heads, head_dim = q.shape
    own, rope, head_dim_v = k.shape[2], k_rope.shape[1], v.shape[2]
    out = q.new_empty(num_tokens, num_heads, head_dim_v) if out is None else out
    require(own + rope == head_dim, "a key's two parts are as long as q")
    require(k.shape[:2] == v.shape[:2] == (k_rope.shape[0], num_heads), "k, k_rope and v have the same keys and heads")
    require(out.shape == (num_tokens, num_heads, head_dim_v), "out is [num_tokens, num_heads, head_dim_v]")
    require(cu_q_lens.shape == cu_kv_lens.shape, "every sequence has its lengths")
    require(all(x.stride(-1) == 1 for x in (q, k, k_rope, v, out)), "rows are contiguous")
    lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)
    block_m, block_n, num_warps, num_stages = pick_tile(head_dim, q.element_size(), q.device)
    _expanded_attention_kernel[(triton.cdiv(max_q_len, block_m), num_heads, cu_q_lens.shape[0] - 1)](
        q,
        k,
        k_rope,
        v,
        out,
        lse,
        cu_q_lens,
        cu_kv_lens,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        k_rope.stride(0),
        v.stride(0),
        v.stride(1),
        out.stride(0),
        out.stride(1),
        OWN=own,
        ROPE=rope,
        HEAD_DIM_V=head_dim_v,
        BLOCK_OWN=padded_head_dim(own),
        BLOCK_ROPE=padded_head_dim(rope),
        BLOCK_V=padded_head_dim(head_dim_v),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        IS_CAUSAL=is_causal,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out, lse


def pick_tile(head_dim: int, element_size: int, device: torch.device) -> tuple[int, ...]:
    """BLOCK_M, BLOCK_N, warps and pipeline stages."""
    if measured := tuned("expanded_attention", tile_key(head_dim, element_size), device):
        return measured
    if element_size > 2:  # float32, without tensor cores
        return 32, 32, 4, 1
    return 128, 64, 8, 2


def tile_key(head_dim: int, element_size: int) -> str:
    return f"head_dim {head_dim}, {element_size} bytes"
