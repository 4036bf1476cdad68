"""A matrix product for each head: what takes queries into latent space, and latent attention's output out of it.

Tiles differ in nothing but their number of tokens, and are computed by the same instructions: a token's bits do not
depend on the others.
"""

import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.checks import require

FEW_TOKENS, MANY_TOKENS = 16, 32  # of a program; more would be other instructions
BLOCK_OUTS, MAX_BLOCK_INS = 128, 128


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_heads_kernel(
    x_ptr,
    weight_ptr,
    cos_ptr,  # None: no rotary part
    sin_ptr,
    out_ptr,
    num_tokens,
    num_ins,
    num_outs,
    half,
    x_stride_token,
    x_stride_head,
    weight_stride_head,
    weight_stride_in,
    weight_stride_out,
    angle_stride,
    out_stride_token,
    out_stride_head,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTS: tl.constexpr,
    BLOCK_INS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    head = tl.program_id(1)
    tokens = (tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    outs = tl.program_id(2) * BLOCK_OUTS + tl.arange(0, BLOCK_OUTS)
    valid_tokens, valid_outs = (tokens < num_tokens)[:, None], (outs < num_outs)[None, :]
    x_rows = x_ptr + tokens[:, None] * x_stride_token + head * x_stride_head
    out_rows = out_ptr + tokens[:, None] * out_stride_token + head * out_stride_head
    dtype = out_ptr.dtype.element_ty
    weight_ptrs = weight_ptr + head.to(tl.int64) * weight_stride_head + outs[None, :] * weight_stride_out
    acc = tl.zeros([BLOCK_TOKENS, BLOCK_OUTS], dtype=tl.float32)
    for first in range(0, num_ins, BLOCK_INS):
        ins = first + tl.arange(0, BLOCK_INS)
        inside = ins < num_ins
        x = tl.load(x_rows + ins[None, :], mask=valid_tokens & inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs + ins[:, None] * weight_stride_in, mask=valid_outs & inside[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    tl.store(out_rows + outs[None, :], acc.to(dtype), mask=valid_tokens & valid_outs)

    if cos_ptr is not None:  # noqa: SIM102 - decided when compiling
        if tl.program_id(2) == 0:
            pairs = tl.arange(0, BLOCK_HALF)[None, :]
            mask = valid_tokens & (pairs < half)
            cos = tl.load(cos_ptr + tokens[:, None] * angle_stride + pairs, mask=mask, other=0.0)
            sin = tl.load(sin_ptr + tokens[:, None] * angle_stride + pairs, mask=mask, other=0.0)
            left = tl.load(x_rows + num_ins + pairs, mask=mask, other=0.0).to(tl.float32)
            right = tl.load(x_rows + num_ins + half + pairs, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_rows + num_outs + pairs, (left * cos - right * sin).to(dtype), mask=mask)
            tl.store(out_rows + num_outs + half + pairs, (right * cos + left * sin).to(dtype), mask=mask)


def multiply_heads(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out[:, h] = x[:, h] weight[h] for x [num_tokens, num_heads, ins], weight [num_heads, ins, outs] of any strides.

    out [num_tokens, num_heads, outs].
    """
    require(x.shape[2] == weight.shape[1], "weight is [num_heads, ins, outs] for x [tokens, num_heads, ins]")
    require(out.shape[2] == weight.shape[2], "out is [num_tokens, num_heads, outs]")
    _launch(x, weight, None, None, out)


def absorb_queries(q: Tensor, w_uk: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Take queries into latent space: out[:, h] = (q's plain part times w_uk[h], q's rotary part rotated).

    q [num_tokens, num_heads, nope + rope], w_uk [num_heads, nope, rank]; cos and sin [num_tokens, rope / 2] in float32
    for the half-split order; out [num_tokens, num_heads, rank + rope].
    """
    nope, rank, rope = w_uk.shape[1], w_uk.shape[2], 2 * cos.shape[1]
    require(q.shape[2] == nope + rope and out.shape[2] == rank + rope, "q is [.., nope + rope], out [.., rank + rope]")
    require(cos.shape[0] == q.shape[0] and cos.shape == sin.shape, "cos and sin are [num_tokens, rope / 2]")
    require(cos.stride(1) == 1 and cos.stride() == sin.stride(), "cos and sin have contiguous rows")
    _launch(q, w_uk, cos, sin, out)


def _launch(x: Tensor, weight: Tensor, cos: Tensor | None, sin: Tensor | None, out: Tensor) -> None:
    (num_tokens, num_heads), (num_ins, num_outs) = x.shape[:2], weight.shape[1:]
    require(out.shape[:2] == x.shape[:2] and weight.shape[0] == num_heads, "all have the same tokens and heads")
    require(x.stride(2) == out.stride(2) == 1, "rows are contiguous")
    block_outs = min(BLOCK_OUTS, max(16, triton.next_power_of_2(num_outs)))
    block_ins = min(MAX_BLOCK_INS, max(16, triton.next_power_of_2(num_ins)))
    half = cos.shape[1] if cos is not None else 0
    block_tokens = FEW_TOKENS if num_tokens <= 2 * FEW_TOKENS else MANY_TOKENS
    _multiply_heads_kernel[(triton.cdiv(num_tokens, block_tokens), num_heads, triton.cdiv(num_outs, block_outs))](
        x,
        weight,
        cos,
        sin,
        out,
        num_tokens,
        num_ins,
        num_outs,
        half,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        weight.stride(1),
        weight.stride(2),
        cos.stride(0) if cos is not None else 0,
        out.stride(0),
        out.stride(1),
        BLOCK_TOKENS=block_tokens,
        BLOCK_OUTS=block_outs,
        BLOCK_INS=block_ins,
        BLOCK_HALF=triton.next_power_of_2(max(half, 1)),
        num_warps=4,
    )
