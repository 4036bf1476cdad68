"""Which implementation of the kernels a device gets: Triton's on CUDA, their torch twins elsewhere."""

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from limpet.kernels import reference


class Kernels(Protocol):
    """What both implementations offer; shapes stand in `limpet.kernels.reference`."""

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor: ...

    def apply_rotary(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None: ...

    def silu_and_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor: ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, fixed_order: bool = False) -> Tensor: ...

    def rotate_and_store(
        self, heads: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> None: ...

    def decode_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        kv_lens: Tensor,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def prefill_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        cu_q_lens: Tensor,
        kv_lens: Tensor,
        max_q_len: int,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def fixed_order_decode_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        kv_lens: Tensor,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def fixed_order_prefill_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        cu_q_lens: Tensor,
        kv_lens: Tensor,
        max_q_len: int,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def store_latents(
        self,
        rows: Tensor,
        norm_weight: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        latent_cache: Tensor,
        slots: Tensor,
    ) -> None: ...

    def latent_decode_attention(
        self,
        q: Tensor,
        latent_cache: Tensor,
        block_tables: Tensor,
        kv_lens: Tensor,
        rank: int,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor: ...

    def expanded_attention(
        self,
        q: Tensor,
        k: Tensor,
        k_rope: Tensor,
        v: Tensor,
        cu_q_lens: Tensor,
        cu_kv_lens: Tensor,
        max_q_len: int,
        scale: float,
        is_causal: bool,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def merge_attention(self, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None: ...

    def absorb_queries(self, q: Tensor, w_uk: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None: ...

    def multiply_heads(self, x: Tensor, weight: Tensor, out: Tensor) -> None: ...

    def mix_experts(
        self,
        x: Tensor,
        router: Tensor,
        gate_up: Tensor,
        down: Tensor,
        top_k: int,
        num_groups: int,
        groups_per_token: int,
        scaling_factor: float,
        normalizes: bool,
        routed: range | None = None,
        fixed_order: bool = False,
    ) -> Tensor: ...

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seed: Tensor,
        draws: bool,
        filters: bool,
        out: Tensor | None = None,
    ) -> Tensor: ...


@cache
def kernels_for(device: torch.device) -> Kernels:
    if device.type == "cuda":
        from limpet.kernels import launchers  # Triton comes with torch for CUDA only

        return launchers
    return reference
