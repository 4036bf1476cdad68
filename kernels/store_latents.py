"""Normalises and rotates the step's latent rows and writes them into the paged cache."""

import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.checks import require


@triton.jit
def _store_latents_kernel(
    rows_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    cache_ptr,
    slots_ptr,
    rank,
    half,
    eps,
    row_stride,
    angle_stride,
    slot_stride,
    BLOCK_RANK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    row, target = rows_ptr + token * row_stride, cache_ptr + slot * slot_stride
    dtype = rows_ptr.dtype.element_ty

    columns = tl.arange(0, BLOCK_RANK)
    mask = columns < rank
    x = tl.load(row + columns, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    y = (x * tl.rsqrt(tl.sum(x * x, axis=0) / rank + eps) * weight).to(dtype)
    tl.store(row + columns, y, mask=mask)
    tl.store(target + columns, y, mask=mask)

    pairs = tl.arange(0, BLOCK_HALF)
    mask = pairs < half
    cos = tl.load(cos_ptr + token * angle_stride + pairs, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + token * angle_stride + pairs, mask=mask, other=0.0)
    first = tl.load(row + rank + pairs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(row + rank + half + pairs, mask=mask, other=0.0).to(tl.float32)
    rotated_first = (first * cos - second * sin).to(dtype)
    rotated_second = (second * cos + first * sin).to(dtype)
    tl.store(row + rank + pairs, rotated_first, mask=mask)
    tl.store(row + rank + half + pairs, rotated_second, mask=mask)
    tl.store(target + rank + pairs, rotated_first, mask=mask)
    tl.store(target + rank + half + pairs, rotated_second, mask=mask)


def store_latents(
    rows: Tensor, norm_weight: Tensor, eps: float, cos: Tensor, sin: Tensor, latent_cache: Tensor, slots: Tensor
) -> None:
    """Make projected rows [num_tokens, rank + rope] latent rows, in place, and write them into the cache.

    The first `rank` columns are normalised (weight [rank]), the others rotated by cos and sin [num_tokens, rope / 2] in
    the half-split order; slots [num_tokens] int64.
    """
    num_tokens, row_dim = rows.shape
    rank, half = norm_weight.shape[0], cos.shape[1]
    require(rank + 2 * half == row_dim == latent_cache.shape[2], "rows and cache rows are [rank + rope]")
    require(cos.shape == sin.shape == (num_tokens, half) and cos.stride() == sin.stride(), "cos is like sin")
    require(slots.shape == (num_tokens,) and slots.is_contiguous(), "every row has its slot")
    require(rows.stride(1) == cos.stride(1) == 1 and norm_weight.is_contiguous(), "rows are contiguous")
    require(latent_cache.is_contiguous(), "the cache is contiguous")
    _store_latents_kernel[(num_tokens,)](
        rows,
        norm_weight,
        cos,
        sin,
        latent_cache,
        slots,
        rank,
        half,
        eps,
        rows.stride(0),
        cos.stride(0),
        latent_cache.stride(1),
        BLOCK_RANK=triton.next_power_of_2(rank),
        BLOCK_HALF=triton.next_power_of_2(half),
        num_warps=4,
    )
