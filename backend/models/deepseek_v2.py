"""DeepSeek-V2 and V2-Lite: latent attention, and mixtures of experts after some leading dense layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limpet.backend.attention_metadata import AttentionMetadata
from limpet.backend.cache_layout import CacheLayout
from limpet.backend.checkpoint import ExpertsConfig, LatentAttentionConfig, ModelConfig
from limpet.backend.layers.activation import silu_and_mul
from limpet.backend.layers.device_kernels import kernels_for
from limpet.backend.layers.experts import ExpertParts, MixtureOfExperts
from limpet.backend.layers.latent_attention import LatentAttention
from limpet.backend.layers.latent_context import LatentStep
from limpet.backend.layers.linear import Linear, RowParallelLinear, gate_up_proj
from limpet.backend.layers.norm import HiddenNorm, RMSNorm, sum_for_norm
from limpet.backend.layers.rotary import softmax_factor
from limpet.backend.layers.weight import Weight
from limpet.backend.models.causal_lm import CausalLM
from limpet.backend.ranks.group import RankGroup

LATENT_NORM_EPS = 1e-6  # whatever rms_norm_eps says: the released code's default

LayerCache = tuple[Tensor]  # latent rows: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]
Angles = tuple[Tensor, Tensor]  # cos, sin: [num_tokens, qk_rope_head_dim / 2]


class DecoderLayer(nn.Module):
    """Latent attention and an MLP or experts, each behind a norm; parameter names are the checkpoint's."""

    def __init__(
        self,
        config: ModelConfig,
        latent: LatentAttentionConfig,
        experts: ExpertsConfig | None,
        attention: LatentAttention,
        ranks: RankGroup,
    ) -> None:
        super().__init__()
        self.ranks, hidden = ranks, config.hidden_size
        self.input_norm = HiddenNorm(ranks, hidden, config.rms_norm_eps)
        self._add_attention(config, latent, attention)
        self.post_attention_norm = HiddenNorm(ranks, hidden, config.rms_norm_eps)
        self.mixture: MixtureOfExperts | None = None
        self.shared_gate_up: Weight | None = None
        self.shared_down: Weight | None = None
        if experts is None:
            self.gate_up_proj = gate_up_proj(ranks, hidden, config.intermediate_size)
            self.down_proj = RowParallelLinear(ranks, config.intermediate_size, hidden)
        else:
            self._add_experts(hidden, experts)

    def _add_attention(self, config: ModelConfig, latent: LatentAttentionConfig, attention: LatentAttention) -> None:
        """Latents are the same on all ranks, and what is made of them has this rank's heads."""
        hidden, num_queries, self.head_dim = config.hidden_size, config.num_heads * config.head_dim, config.head_dim
        heads, queries = {0: [self.ranks.part(config.num_heads)]}, self.ranks.part(num_queries)
        self.q_a_norm = self.q_b_proj = None
        if latent.q_lora_rank is None:
            self.split_sizes = (len(queries), latent.row_dim)
            rows = [queries, range(num_queries, num_queries + latent.row_dim)]
            self.q_kv_a_proj = Linear(hidden, num_queries + latent.row_dim, outs=rows)
        else:
            self.split_sizes = (latent.q_lora_rank, latent.row_dim)
            self.q_kv_a_proj = Linear(hidden, sum(self.split_sizes))
            self.q_a_norm = RMSNorm(latent.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = Linear(latent.q_lora_rank, num_queries, outs=[queries])
        self.kv_a_norm = RMSNorm(latent.kv_lora_rank, LATENT_NORM_EPS)
        self.w_uk = Weight(config.num_heads, latent.qk_nope_head_dim, latent.kv_lora_rank, parts=heads)
        self.w_uv = Weight(config.num_heads, latent.v_head_dim, latent.kv_lora_rank, parts=heads)
        self.attention = attention
        self.o_proj = RowParallelLinear(self.ranks, config.num_heads * latent.v_head_dim, hidden)

    def _add_experts(self, hidden: int, experts: ExpertsConfig) -> None:
        parts = ExpertParts.of(experts, self.ranks)
        num_all, intermediate = experts.num_experts + experts.num_shared_experts, experts.intermediate_size
        self.mixture = MixtureOfExperts(experts, parts.routed)
        self.router = Weight(experts.num_experts, hidden)
        stacked = {0: [parts.routed, parts.shared]}
        self.experts_gate_up = Weight(num_all, 2 * intermediate, hidden, parts=stacked)
        self.experts_down = Weight(num_all, hidden, intermediate, parts=stacked)
        if parts.split is not None:
            expert, columns = [parts.split.expert], parts.split.columns
            gate_and_up = [columns, range(intermediate + columns.start, intermediate + columns.stop)]
            self.shared_gate_up = Weight(
                num_all, 2 * intermediate, hidden, parts={0: expert, 1: gate_and_up}, stored_as="experts_gate_up"
            )
            self.shared_down = Weight(
                num_all, hidden, intermediate, parts={0: expert, 2: [columns]}, stored_as="experts_down"
            )

    def forward(self, x: Tensor, residual: Tensor, angles: Angles, cache: LayerCache, plan: LatentStep) -> Tensor:
        """x [num_tokens, hidden] is added to `residual` in place; returns what the next norm adds to it."""
        x = self._attention(self.input_norm(x, residual), angles, cache, plan)
        return self._mlp(self.post_attention_norm(x, residual))

    def _attention(self, x: Tensor, angles: Angles, cache: LayerCache, plan: LatentStep) -> Tensor:
        (latent_cache,) = cache
        q, rows = self.q_kv_a_proj(x).split(self.split_sizes, dim=1)
        if self.q_a_norm is not None and self.q_b_proj is not None:
            q = self.q_b_proj(self.q_a_norm(q))
        q = q.unflatten(1, (-1, self.head_dim))
        norm = self.kv_a_norm
        kernels_for(x.device).store_latents(rows, norm.weight, norm.eps, *angles, latent_cache, plan.step.slots)
        out = self.attention(
            q, rows, angles, self.w_uk, self.w_uv, latent_cache, plan
        )  # [num_tokens, num_heads, v_head_dim]
        y: Tensor = self.o_proj(out.flatten(1))
        return y

    def _mlp(self, x: Tensor) -> Tensor:
        y: Tensor
        if self.mixture is None:
            y = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
            return y
        y = self.mixture(x, self.router, self.experts_gate_up, self.experts_down)
        if self.shared_gate_up is not None and self.shared_down is not None:
            y += F.linear(silu_and_mul(F.linear(x, self.shared_gate_up[0])), self.shared_down[0])
        return sum_for_norm(self.ranks, y)


class DeepseekV2ForCausalLM(CausalLM):
    """Layers of latent attention, which is one module for all of them."""

    captures_prefills = True

    def __init__(self, config: ModelConfig, session_len: int, device: torch.device, ranks: RankGroup) -> None:
        latent, experts = config.latent_attention, config.experts
        assert latent is not None
        attention = LatentAttention(latent, config.head_dim**-0.5 * softmax_factor(config.rope_scaling))
        num_dense = experts.num_dense_layers if experts is not None else config.num_layers
        layers = [
            DecoderLayer(config, latent, experts if layer >= num_dense else None, attention, ranks)
            for layer in range(config.num_layers)
        ]
        super().__init__(config, layers, session_len, device, ranks)
        self.attention = attention
        self.cache_layout = CacheLayout(config.num_layers, 1, (latent.row_dim,))

    def forward(self, ids: Tensor, positions: Tensor, caches: list[LayerCache], step: AttentionMetadata) -> Tensor:
        """ids and positions [num_tokens] -> hidden states [num_tokens, hidden]."""
        angles = self.rotary.at(positions)
        plan = self.attention.plan(step, caches[0][0].shape[1])
        x = self.embed_tokens(ids)
        residual = torch.zeros_like(x)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, residual, angles, cache, plan)
        hidden: Tensor = self.norm(x, residual)
        return hidden
