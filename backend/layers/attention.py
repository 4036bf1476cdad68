"""Attention over the paged cache: decodes and prefill chunks of one step."""

import torch
from torch import Tensor, nn

from limpet.backend.attention_metadata import AttentionMetadata
from limpet.backend.layers.device_kernels import kernels_for


class PagedAttention(nn.Module):
    """Rotates queries and keys, stores keys and values, then attends. Softmax scale `scale`.

    With `fixed_order` a token's bits do not depend on what else the step computes (CUDA).
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.fixed_order = False

    def forward(
        self, heads: Tensor, angles: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor], step: AttentionMetadata
    ) -> Tensor:
        """heads [num_tokens, q + k + v heads, head_dim] -> [num_tokens, q heads, head_dim].

        In a captured step the decodes are padded: the prefills' outputs, written later, replace what that leaves.
        """
        kernels_for(heads.device).rotate_and_store(heads, *angles, *cache, step.slots)
        q = heads[:, : heads.shape[1] - 2 * cache[0].shape[2]]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
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
        tables, starts, kv_lens = step.prefill_block_tables, step.chunk_starts, step.prefill_kv_lens
        prefill(q, *cache, tables, starts, kv_lens, step.max_q_len, self.scale, out=out)
