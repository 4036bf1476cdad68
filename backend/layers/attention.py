"""Attention over the paged cache: decodes and prefill chunks of one step."""

import torch
from torch import Tensor, nn

from limpet.backend.attention_metadata import AttentionMetadata
from limpet.kernels.reference import decode_attention, prefill_attention, store_kv


class PagedAttention(nn.Module):
    """Stores the step's keys and values, then attends. Softmax scale `scale`; heads divisible by KV heads."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor], step: AttentionMetadata) -> Tensor:
        """q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim] -> like q."""
        k_cache, v_cache = cache
        store_kv(k, v, k_cache, v_cache, step.slots)
        split = step.num_decodes
        outputs = []
        if split:
            tables, lengths = step.decode_block_tables, step.decode_kv_lens
            outputs.append(decode_attention(q[:split], k_cache, v_cache, tables, lengths, self.scale))
        if step.prefill_q_lens:
            tables, lengths = step.prefill_block_tables, step.prefill_kv_lens
            outputs.append(
                prefill_attention(q[split:], k_cache, v_cache, tables, step.prefill_q_lens, lengths, self.scale)
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
