"""The Triton launchers under one name: the counterpart of `limpet.kernels.reference`. Importing it needs Triton."""

from limpet.kernels.decode_attention import decode_attention
from limpet.kernels.expanded_attention import expanded_attention
from limpet.kernels.expert_routing import route
from limpet.kernels.fixed_order_attention import fixed_order_decode_attention, fixed_order_prefill_attention
from limpet.kernels.latent_decode_attention import latent_decode_attention
from limpet.kernels.linear import linear
from limpet.kernels.merge_attention import merge_attention
from limpet.kernels.mix_experts import mix_experts
from limpet.kernels.multiply_heads import absorb_queries, multiply_heads
from limpet.kernels.prefill_attention import prefill_attention
from limpet.kernels.rms_norm import rms_norm
from limpet.kernels.rotary import apply_rotary
from limpet.kernels.rotate_and_store import rotate_and_store
from limpet.kernels.sampling import sample
from limpet.kernels.silu_and_mul import silu_and_mul
from limpet.kernels.store_latents import store_latents

__all__ = [
    "absorb_queries",
    "apply_rotary",
    "decode_attention",
    "expanded_attention",
    "fixed_order_decode_attention",
    "fixed_order_prefill_attention",
    "latent_decode_attention",
    "linear",
    "merge_attention",
    "mix_experts",
    "multiply_heads",
    "prefill_attention",
    "rms_norm",
    "rotate_and_store",
    "route",
    "sample",
    "silu_and_mul",
    "store_latents",
]
