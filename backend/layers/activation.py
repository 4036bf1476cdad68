"""The gate of a gated MLP."""

from torch import Tensor

from limpet.backend.layers.device_kernels import kernels_for


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [num_tokens, 2 * intermediate] = gate columns, then up columns."""
    return kernels_for(gate_up.device).silu_and_mul(gate_up)
