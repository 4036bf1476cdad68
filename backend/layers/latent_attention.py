"""Multi-head latent attention over the paged cache of latent rows (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

With a token's latents c [R], rotated key part r [P], and a head's query (q, p) the score of a cached token is
q W_UK c + p r and its value W_UV c. Two forms of the same sum:
    absorbed   q W_UK is computed first, [R] for each head; keys are then the rows (c, r), values c, and W_UV is applied
               to what attention gives. One row serves all heads, which decoding wants: it is bound by what it reads.
    expanded   W_UK c and W_UV c are computed for every cached token and head. That costs R (nope + v) products a token
               once, after which a query-key pair costs nope + P + v of them in the place of 2 R + P: prefill wants it.
"""

from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from limpet.backend.attention_metadata import AttentionMetadata
from limpet.backend.checkpoint import LatentAttentionConfig
from limpet.backend.layers.device_kernels import kernels_for
from limpet.backend.layers.latent_context import ContextPiece, LatentStep, cut_context
from limpet.backend.layers.rotary import rotate

Angles: TypeAlias = tuple[Tensor, Tensor]  # cos, sin: [num_tokens, rope / 2]


class LatentAttention(nn.Module):
    """Softmax scale `scale`. Holds no weights, so that all layers share one.

    Prefill chunks are expanded where the host knows their lengths and they are long. With `fixed_order` a token's bits
    do not depend on what else the step computes (CUDA): all tokens are absorbed.
    """

    def __init__(self, config: LatentAttentionConfig, scale: float) -> None:
        super().__init__()
        self._rank, self._nope, self._v_dim = config.kv_lora_rank, config.qk_nope_head_dim, config.v_head_dim
        self._row_dim = config.row_dim
        self._scale = scale
        self.fixed_order = False
        saved_by_pair = (self._rank + self._row_dim) - (self._nope + config.qk_rope_head_dim + self._v_dim)
        cost_of_key = self._rank * (self._nope + self._v_dim)
        self._expands_from = cost_of_key / saved_by_pair if saved_by_pair > 0 else float("inf")  # new tokens

    def plan(self, step: AttentionMetadata, block_size: int) -> LatentStep:
        """What all layers do in this step: once a step, before the first of them."""
        lengths = step.prefill_context_lens
        if not lengths or self.fixed_order or (any(lengths) and step.max_q_len < self._expands_from):
            return LatentStep(step, [], expands=False)
        return LatentStep(step, cut_context(step, lengths, block_size), expands=True)

    def forward(
        self,
        q: Tensor,
        rows: Tensor,
        angles: Angles,
        w_uk: Tensor,
        w_uv: Tensor,
        latent_cache: Tensor,
        plan: LatentStep,
    ) -> Tensor:
        """q [num_tokens, num_heads, nope + rope]; `rows` [num_tokens, rank + rope], which are in the cache already.

        w_uk [num_heads, nope, rank], w_uv [num_heads, v_head_dim, rank]; returns [num_tokens, num_heads, v_head_dim].
        """
        out = q.new_empty(*q.shape[:2], self._v_dim)
        end = plan.step.num_decodes if plan.expands else q.shape[0]
        if end:
            first = angles[0][:end], angles[1][:end]
            self._attend_absorbed(q[:end], first, w_uk, w_uv, latent_cache, plan, out[:end])
        if plan.expands:
            rotate(q[end:, :, self._nope :], (angles[0][end:], angles[1][end:]))
            self._attend_expanded(q[end:], rows[end:], w_uk, w_uv, latent_cache, plan, out[end:])
        return out

    def _attend_absorbed(
        self,
        q: Tensor,
        angles: Angles,
        w_uk: Tensor,
        w_uv: Tensor,
        latent_cache: Tensor,
        plan: LatentStep,
        out: Tensor,
    ) -> None:
        """In a captured step the decodes are padded: the prefills' outputs, written later, replace what that leaves."""
        kernels, step = kernels_for(q.device), plan.step
        absorbed = q.new_empty(*q.shape[:2], self._row_dim)
        kernels.absorb_queries(q, w_uk, *angles, absorbed)
        latent_out = q.new_empty(*q.shape[:2], self._rank)
        if step.num_decodes:
            self._decode(absorbed, latent_cache, step, latent_out)
        if step.max_q_len and not plan.expands:
            attend = kernels.fixed_order_prefill_attention if self.fixed_order else kernels.prefill_attention
            keys, values = self._keys_and_values(latent_cache)
            tables, starts, kv_lens = step.prefill_block_tables, step.chunk_starts, step.prefill_kv_lens
            attend(absorbed, keys, values, tables, starts, kv_lens, step.max_q_len, self._scale, out=latent_out)
        kernels.multiply_heads(latent_out, w_uv.transpose(1, 2), out)

    def _decode(self, absorbed: Tensor, latent_cache: Tensor, step: AttentionMetadata, out: Tensor) -> None:
        kernels, end = kernels_for(absorbed.device), step.num_decodes
        q, out, tables, kv_lens = absorbed[:end], out[:end], step.decode_block_tables, step.decode_kv_lens
        if self.fixed_order:
            keys, values = self._keys_and_values(latent_cache)
            kernels.fixed_order_decode_attention(q, keys, values, tables, kv_lens, self._scale, out=out)
        else:
            kernels.latent_decode_attention(q, latent_cache, tables, kv_lens, self._rank, self._scale, out=out)

    def _keys_and_values(self, latent_cache: Tensor) -> tuple[Tensor, Tensor]:
        """The cache as attention over one K/V head sees it."""
        keys = latent_cache.unsqueeze(2)
        return keys, keys[..., : self._rank]

    def _attend_expanded(
        self, q: Tensor, rows: Tensor, w_uk: Tensor, w_uv: Tensor, latent_cache: Tensor, plan: LatentStep, out: Tensor
    ) -> None:
        kernels, step = kernels_for(q.device), plan.step
        q_lens = step.cu_q_lens
        _, lse = kernels.expanded_attention(
            q, *self._expand(rows, w_uk, w_uv), q_lens, q_lens, step.max_q_len, self._scale, is_causal=True, out=out
        )
        for piece in plan.pieces:
            other, other_lse = self._attend_to_context(q, w_uk, w_uv, latent_cache, plan, piece)
            kernels.merge_attention(out, lse, other, other_lse)

    def _attend_to_context(
        self, q: Tensor, w_uk: Tensor, w_uv: Tensor, latent_cache: Tensor, plan: LatentStep, piece: ContextPiece
    ) -> tuple[Tensor, Tensor]:
        rows = latent_cache.flatten(0, 1).index_select(0, piece.slots)
        return kernels_for(q.device).expanded_attention(
            q,
            *self._expand(rows, w_uk, w_uv),
            plan.step.cu_q_lens,
            piece.cu_kv_lens,
            plan.step.max_q_len,
            self._scale,
            is_causal=False,
        )

    def _expand(self, rows: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys without rotary part [num_keys, num_heads, nope], rotary parts [num_keys, rope], values."""
        latents = rows[:, : self._rank]
        k = F.linear(latents, w_uk.flatten(0, 1)).view(-1, *w_uk.shape[:2])
        v = F.linear(latents, w_uv.flatten(0, 1)).view(-1, *w_uv.shape[:2])
        return k, rows[:, self._rank :], v
