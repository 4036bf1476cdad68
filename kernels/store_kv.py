"""Writes the step's keys and values into the paged cache."""

import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.checks import require

MAX_ELEMENTS = 1024  # of keys or values that a program holds at once


@triton.jit
def _copy_heads(
    source_ptr,
    target_ptr,
    source_stride_head,
    target_stride_head,
    num_heads,
    head_dim,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_DIM)
    for first in range(0, num_heads, BLOCK_HEADS):
        heads = first + tl.arange(0, BLOCK_HEADS)
        mask = (heads < num_heads)[:, None] & (columns < head_dim)[None, :]
        x = tl.load(source_ptr + (heads * source_stride_head)[:, None] + columns[None, :], mask=mask)
        tl.store(target_ptr + (heads * target_stride_head)[:, None] + columns[None, :], x, mask=mask)


@triton.jit
def _store_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    num_heads,
    head_dim_qk,
    head_dim_v,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    k_cache_stride_slot,
    k_cache_stride_head,
    v_cache_stride_slot,
    v_cache_stride_head,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM_QK: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    k_row, k_slot = k_ptr + token * k_stride_token, k_cache_ptr + slot * k_cache_stride_slot
    v_row, v_slot = v_ptr + token * v_stride_token, v_cache_ptr + slot * v_cache_stride_slot
    _copy_heads(k_row, k_slot, k_stride_head, k_cache_stride_head, num_heads, head_dim_qk, BLOCK_HEADS, BLOCK_DIM_QK)
    _copy_heads(v_row, v_slot, v_stride_head, v_cache_stride_head, num_heads, head_dim_v, BLOCK_HEADS, BLOCK_DIM_V)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write k [num_tokens, num_kv_heads, head_dim_qk] and v into the cache; slots [num_tokens] int64."""
    num_tokens, num_heads, head_dim_qk = k.shape
    head_dim_v = v.shape[2]
    require(v.shape[:2] == k.shape[:2] and slots.shape == (num_tokens,), "k, v and slots have the same tokens")
    require(k_cache.shape[2:] == k.shape[1:] and v_cache.shape[2:] == v.shape[1:], "caches have k's and v's heads")
    require(k_cache.is_contiguous() and v_cache.is_contiguous(), "caches are contiguous")
    require(k.stride(2) == 1 and v.stride(2) == 1 and slots.is_contiguous(), "rows are contiguous")
    block_qk, block_v = triton.next_power_of_2(head_dim_qk), triton.next_power_of_2(head_dim_v)
    block_heads = min(triton.next_power_of_2(num_heads), max(1, MAX_ELEMENTS // max(block_qk, block_v)))
    _store_kv_kernel[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        num_heads,
        head_dim_qk,
        head_dim_v,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(1),
        v_cache.stride(2),
        BLOCK_HEADS=block_heads,
        BLOCK_DIM_QK=block_qk,
        BLOCK_DIM_V=block_v,
        num_warps=4,
    )
