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

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None: ...

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
