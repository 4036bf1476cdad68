"""Merges attention over some keys with attention over others."""

import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.checks import require

ELEMENTS_PER_PROGRAM = 2048


@triton.jit(do_not_specialize=["num_rows"])
def _merge_attention_kernel(
    out_ptr,
    lse_ptr,
    other_ptr,
    other_lse_ptr,
    num_rows,
    num_heads,
    head_dim,
    out_stride_token,
    out_stride_head,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_DIM)
    valid = rows < num_rows
    lse = tl.load(lse_ptr + rows, mask=valid, other=0.0)
    other_lse = tl.load(other_lse_ptr + rows, mask=valid, other=0.0)
    larger = tl.maximum(lse, other_lse)
    weight, other_weight = tl.exp2(lse - larger), tl.exp2(other_lse - larger)
    total = weight + other_weight
    mask = valid[:, None] & (columns < head_dim)[None, :]
    out_rows = rows // num_heads * out_stride_token + rows % num_heads * out_stride_head
    out_ptrs = out_ptr + out_rows[:, None] + columns[None, :]
    x = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(other_ptr + (rows * head_dim)[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    y = x * (weight / total)[:, None] + other * (other_weight / total)[:, None]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + rows, larger + tl.log2(total), mask=valid)


def merge_attention(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Make (out, lse), attention over some keys, that over `other`'s keys too, in place.

    out and other [num_tokens, num_heads, head_dim_v]; log-sum-exps [num_tokens, num_heads] in float32 and to base 2;
    every token has seen some key in `out`.
    """
    num_tokens, num_heads, head_dim = out.shape
    require(other.shape == out.shape and other.is_contiguous(), "other is contiguous and like out")
    require(lse.shape == other_lse.shape == (num_tokens, num_heads), "log-sum-exps are [num_tokens, num_heads]")
    require(out.stride(2) == 1 and lse.is_contiguous() and other_lse.is_contiguous(), "rows are contiguous")
    block_dim = triton.next_power_of_2(head_dim)
    block_rows = max(1, ELEMENTS_PER_PROGRAM // block_dim)
    num_rows = num_tokens * num_heads
    _merge_attention_kernel[(triton.cdiv(num_rows, block_rows),)](
        out,
        lse,
        other,
        other_lse,
        num_rows,
        num_heads,
        head_dim,
        out.stride(0),
        out.stride(1),
        BLOCK_ROWS=block_rows,
        BLOCK_DIM=block_dim,
        num_warps=4,
    )
