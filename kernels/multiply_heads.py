"""A matrix product for each head: what takes queries into latent space, and latent attention's output out of it.

One tile shape whatever the load, so that a token's bits do not depend on the others.
"""

import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.checks import require

BLOCK_TOKENS, BLOCK_OUTS, MAX_BLOCK_INS = 16, 128, 128


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_heads_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_tokens,
    num_ins,
    num_outs,
    x_stride_token,
    x_stride_head,
    weight_stride_head,
    weight_stride_in,
    weight_stride_out,
    out_stride_token,
    out_stride_head,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTS: tl.constexpr,
    BLOCK_INS: tl.constexpr,
):
    head = tl.program_id(1)
    tokens = (tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    outs = tl.program_id(2) * BLOCK_OUTS + tl.arange(0, BLOCK_OUTS)
    valid_tokens, valid_outs = (tokens < num_tokens)[:, None], (outs < num_outs)[None, :]
    x_ptrs = x_ptr + tokens[:, None] * x_stride_token + head * x_stride_head
    weight_ptrs = weight_ptr + head.to(tl.int64) * weight_stride_head + outs[None, :] * weight_stride_out
    acc = tl.zeros([BLOCK_TOKENS, BLOCK_OUTS], dtype=tl.float32)
    for first in range(0, num_ins, BLOCK_INS):
        ins = first + tl.arange(0, BLOCK_INS)
        inside = ins < num_ins
        x = tl.load(x_ptrs + ins[None, :], mask=valid_tokens & inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs + ins[:, None] * weight_stride_in, mask=valid_outs & inside[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    out_ptrs = out_ptr + tokens[:, None] * out_stride_token + head * out_stride_head + outs[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=valid_tokens & valid_outs)


def multiply_heads(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out[:, h] = x[:, h] weight[h] for x [num_tokens, num_heads, ins], weight [num_heads, ins, outs] of any strides.

    out [num_tokens, num_heads, outs].
    """
    (num_tokens, num_heads, num_ins), num_outs = x.shape, weight.shape[2]
    require(weight.shape[:2] == (num_heads, num_ins), "weight is [num_heads, ins, outs] for x [tokens, num_heads, ins]")
    require(out.shape == (num_tokens, num_heads, num_outs), "out is [num_tokens, num_heads, outs]")
    require(x.stride(2) == out.stride(2) == 1, "rows are contiguous")
    block_outs = min(BLOCK_OUTS, max(16, triton.next_power_of_2(num_outs)))
    block_ins = min(MAX_BLOCK_INS, max(16, triton.next_power_of_2(num_ins)))
    _multiply_heads_kernel[(triton.cdiv(num_tokens, BLOCK_TOKENS), num_heads, triton.cdiv(num_outs, block_outs))](
        x,
        weight,
        out,
        num_tokens,
        num_ins,
        num_outs,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        weight.stride(1),
        weight.stride(2),
        out.stride(0),
        out.stride(1),
        BLOCK_TOKENS=BLOCK_TOKENS,
        BLOCK_OUTS=block_outs,
        BLOCK_INS=block_ins,
        num_warps=4,
    )
