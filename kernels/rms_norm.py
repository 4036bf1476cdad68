"""Root-mean-square norm over the last dimension, with the residual addition before it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.checks import require

ELEMENTS_PER_PROGRAM = 2048  # short rows (the heads of q_norm) share a program


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    heads,
    size,
    eps,
    x_stride_token,
    x_stride_head,
    residual_stride,
    out_stride_token,
    out_stride_head,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_SIZE)
    tokens, head = rows // heads, rows % heads
    mask = (rows < num_rows)[:, None] & (columns < size)[None, :]
    x_rows = tokens * x_stride_token + head * x_stride_head
    x = tl.load(x_ptr + x_rows[:, None] + columns[None, :], mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = residual_ptr + (rows * residual_stride)[:, None] + columns[None, :]
        total = x.to(tl.float32) + tl.load(residual, mask=mask, other=0.0).to(tl.float32)
        x = total.to(residual_ptr.dtype.element_ty)
        tl.store(residual, x, mask=mask)
    x = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)
    weight = tl.load(weight_ptr + columns, mask=columns < size, other=0.0).to(tl.float32)
    y = x * inverse[:, None] * weight[None, :]
    out_rows = tokens * out_stride_token + head * out_stride_head
    tl.store(out_ptr + out_rows[:, None] + columns[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Root-mean-square norm over the last dimension, after adding `x` to `residual` in place if one is given.

    x [num_tokens, size] or [num_tokens, num_heads, size], weight [size], residual [num_tokens, size]; returns `out`
    (may be `x`), like x. Zhang and Sennrich 2019: x / sqrt(mean(x^2) + eps) * weight, computed in float32.
    """
    size = x.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    require(x.dim() in (2, 3) and out.shape == x.shape, "x is [num_tokens, (num_heads,) size], out like it")
    require(weight.shape == (size,) and weight.is_contiguous(), "weight is a contiguous [size]")
    require(x.stride(-1) == 1 and out.stride(-1) == 1, "the last dimension is contiguous")
    require(
        residual is None or (x.dim() == 2 and residual.shape == x.shape and residual.stride(-1) == 1),
        "residual is like a two-dimensional x",
    )
    heads = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * heads
    block_rows, block_size, num_warps = pick_blocks(size)
    _rms_norm_kernel[(triton.cdiv(num_rows, block_rows),)](
        x,
        residual,
        weight,
        out,
        num_rows,
        heads,
        size,
        eps,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        residual.stride(0) if residual is not None else 0,
        out.stride(0),
        out.stride(1) if x.dim() == 3 else 0,
        HAS_RESIDUAL=residual is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_SIZE=block_size,
        num_warps=num_warps,
    )
    return out


def pick_blocks(size: int) -> tuple[int, int, int]:
    """Rows and columns of one program, and its warps."""
    block_size = triton.next_power_of_2(size)
    block_rows = max(1, ELEMENTS_PER_PROGRAM // block_size)
    return block_rows, block_size, min(max(block_rows * block_size // 512, 1), 16)
