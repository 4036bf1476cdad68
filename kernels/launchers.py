"""The Triton launchers under one name: the counterpart of `limpet.kernels.reference`. Importing it needs Triton."""

from limpet.kernels.decode_attention import decode_attention
from limpet.kernels.fixed_order_attention import fixed_order_decode_attention, fixed_order_prefill_attention
from limpet.kernels.linear import linear
from limpet.kernels.prefill_attention import prefill_attention
from limpet.kernels.rms_norm import rms_norm
from limpet.kernels.rotary import apply_rotary
from limpet.kernels.rotate_and_store import rotate_and_store
from limpet.kernels.sampling import sample
from limpet.kernels.silu_and_mul import silu_and_mul

__all__ = [
    "apply_rotary",
    "decode_attention",
    "fixed_order_decode_attention",
    "fixed_order_prefill_attention",
    "linear",
    "prefill_attention",
    "rms_norm",
    "rotate_and_store",
    "sample",
    "silu_and_mul",
]
