"""Attention over the paged cache: decodes and prefill chunks of one step."""

from torch import Tensor, nn

from limpet.backend.attention_metadata import AttentionMetadata
from limpet.backend.layers.device_kernels import kernels_for


class PagedAttention(nn.Module):
    """Stores the step's keys and values, then attends. Softmax scale `scale`; heads divisible by KV heads.

    With `fixed_order` a token's bits do not depend on what else the step computes (CUDA).
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.fixed_order = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor], step: AttentionMetadata) -> Tensor:
        """q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim] -> like q."""
        kernels_for(q.device).store_kv(k, v, *cache, step.slots)
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
        if step.num_decodes:
            self._decode(q, cache, step, out)
        if step.max_q_len:
            self._prefill(q, cache, step, out)
        return out

    def _decode(self, q: Tensor, cache: tuple[Tensor, Tensor], step: AttentionMetadata, out: Tensor) -> None:
        end = step.num_decodes
        kernels = kernels_for(q.device)
        decode = kernels.fixed_order_decode_attention if self.fixed_order else kernels.decode_attention
        decode(q[:end], *cache, step.decode_block_tables, step.decode_kv_lens, self.scale, out=out[:end])

    def _prefill(self, q: Tensor, cache: tuple[Tensor, Tensor], step: AttentionMetadata, out: Tensor) -> None:
        kernels = kernels_for(q.device)
        prefill = kernels.fixed_order_prefill_attention if self.fixed_order else kernels.prefill_attention
        prefill(
            q[step.num_decodes :],
            *cache,
            step.prefill_block_tables,
            step.cu_q_lens,
            step.prefill_kv_lens,
            step.max_q_len,
            self.scale,
            out=out[step.num_decodes :],
        )
