"""Rotary position embedding of a step's queries and keys, and its keys and values written into the paged cache."""

import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.checks import require

PAIRS_PER_PROGRAM = 512


@triton.jit
def _rotate_and_store_kernel(
    heads_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    num_q_heads,
    num_kv_heads,
    half,
    stride_token,
    stride_head,
    angle_stride,
    cache_stride_slot,
    cache_stride_head,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    columns = tl.arange(0, BLOCK_HALF)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + token * angle_stride + columns, mask=columns < half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * angle_stride + columns, mask=columns < half, other=0.0)[None, :]
    is_q, is_v = heads < num_q_heads, heads >= num_q_heads + num_kv_heads
    is_k = ~is_q & ~is_v
    inside = (columns < half)[None, :]
    exists = (heads < num_q_heads + 2 * num_kv_heads)[:, None] & inside
    q_ptrs = heads_ptr + token * stride_token + (heads * stride_head)[:, None] + columns[None, :]
    first = tl.load(q_ptrs, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(q_ptrs + half, mask=exists, other=0.0).to(tl.float32)
    dtype = heads_ptr.dtype.element_ty
    rotated_first = tl.where(is_v[:, None], first, first * cos - second * sin).to(dtype)
    rotated_second = tl.where(is_v[:, None], second, second * cos + first * sin).to(dtype)
    tl.store(q_ptrs, rotated_first, mask=is_q[:, None] & inside)
    tl.store(q_ptrs + half, rotated_second, mask=is_q[:, None] & inside)
    k_rows = slot * cache_stride_slot + (heads - num_q_heads) * cache_stride_head
    k_ptrs = k_cache_ptr + k_rows[:, None] + columns[None, :]
    tl.store(k_ptrs, rotated_first, mask=is_k[:, None] & inside)
    tl.store(k_ptrs + half, rotated_second, mask=is_k[:, None] & inside)
    v_rows = slot * cache_stride_slot + (heads - num_q_heads - num_kv_heads) * cache_stride_head
    v_ptrs = v_cache_ptr + v_rows[:, None] + columns[None, :]
    tl.store(v_ptrs, rotated_first, mask=is_v[:, None] & exists)
    tl.store(v_ptrs + half, rotated_second, mask=is_v[:, None] & exists)


def rotate_and_store(heads: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Rotate the queries of heads [num_tokens, q + k + v heads, head_dim] in place; keys (rotated) and values go into
    the cache. The keys of `heads` hold anything afterwards.

    cos and sin [num_tokens, head_dim / 2] are float32, slots [num_tokens] int64: block * block_size + offset. Su et al.
    2021 in the half-split order: element i pairs with element i + head_dim / 2.
    """
    num_tokens, num_heads, head_dim = heads.shape
    num_kv_heads, half = k_cache.shape[2], head_dim // 2
    require(
        cos.shape == sin.shape == (num_tokens, half) and slots.shape == (num_tokens,), "cos and sin are half as wide"
    )
    require(heads.stride(2) == 1 and cos.stride(1) == 1 and cos.stride() == sin.stride(), "rows are contiguous")
    require(k_cache.shape == v_cache.shape and k_cache.shape[3] == head_dim, "caches have the heads' size")
    require(k_cache.is_contiguous() and v_cache.is_contiguous(), "caches are contiguous")
    block_half = triton.next_power_of_2(half)
    block_heads = min(max(1, PAIRS_PER_PROGRAM // block_half), triton.next_power_of_2(num_heads))
    _rotate_and_store_kernel[(num_tokens, triton.cdiv(num_heads, block_heads))](
        heads,
        cos,
        sin,
        k_cache,
        v_cache,
        slots,
        num_heads - 2 * num_kv_heads,
        num_kv_heads,
        half,
        heads.stride(0),
        heads.stride(1),
        cos.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        num_warps=4,
    )
