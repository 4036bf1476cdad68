"""The gate of a gated MLP."""

import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.checks import require

BLOCK_COLUMNS = 1024


@triton.jit
def _silu_and_mul_kernel(gate_up_ptr, out_ptr, size, gate_up_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate_ptrs = gate_up_ptr + row * gate_up_stride + columns
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + size, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * out_stride + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up for gate_up [num_tokens, 2 * intermediate] = gate columns, then up columns."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size) if out is None else out
    require(gate_up.shape == (num_tokens, 2 * size) and out.shape == (num_tokens, size), "out is half as wide")
    require(gate_up.stride(1) == 1 and out.stride(1) == 1, "rows are contiguous")
    _silu_and_mul_kernel[(num_tokens, triton.cdiv(size, BLOCK_COLUMNS))](
        gate_up, out, size, gate_up.stride(0), out.stride(0), BLOCK=BLOCK_COLUMNS, num_warps=4
    )
    return out
