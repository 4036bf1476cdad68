"""Rotary position embedding, in place."""

import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.checks import require

PAIRS_PER_PROGRAM = 512


@triton.jit
def _rotary_kernel(
    heads_ptr,
    cos_ptr,
    sin_ptr,
    num_heads,
    half,
    stride_token,
    stride_head,
    angle_stride,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    columns = tl.arange(0, BLOCK_HALF)
    cos = tl.load(cos_ptr + token * angle_stride + columns, mask=columns < half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * angle_stride + columns, mask=columns < half, other=0.0)[None, :]
    mask = (heads < num_heads)[:, None] & (columns < half)[None, :]
    first_ptrs = heads_ptr + token * stride_token + (heads * stride_head)[:, None] + columns[None, :]
    first = tl.load(first_ptrs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(first_ptrs + half, mask=mask, other=0.0).to(tl.float32)
    dtype = heads_ptr.dtype.element_ty
    tl.store(first_ptrs, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(first_ptrs + half, (second * cos + first * sin).to(dtype), mask=mask)


def apply_rotary(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads [num_tokens, num_heads, head_dim] in place; cos and sin [num_tokens, rotary_dim / 2] in float32.

    Su et al. 2021 in the half-split order: element i pairs with element i + rotary_dim / 2. Elements past rotary_dim
    stay as they are.
    """
    num_tokens, num_heads, head_dim = heads.shape
    half = cos.shape[1]
    require(cos.shape == sin.shape == (num_tokens, half) and 2 * half <= head_dim, "cos and sin are [num_tokens, half]")
    require(heads.stride(2) == 1 and cos.stride(1) == 1 and cos.stride() == sin.stride(), "rows are contiguous")
    block_half = triton.next_power_of_2(half)
    block_heads = min(max(1, PAIRS_PER_PROGRAM // block_half), triton.next_power_of_2(num_heads))
    _rotary_kernel[(num_tokens, triton.cdiv(num_heads, block_heads))](
        heads,
        cos,
        sin,
        num_heads,
        half,
        heads.stride(0),
        heads.stride(1),
        cos.stride(0),
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        num_warps=4,
    )
