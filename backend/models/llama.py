"""The Llama architecture and its kin (Mistral, Qwen2, Qwen3, InternLM2 after conversion)."""

import torch
from torch import Tensor, nn

from limpet.backend.attention_metadata import AttentionMetadata
from limpet.backend.cache_layout import CacheLayout
from limpet.backend.checkpoint import ModelConfig
from limpet.backend.layers.activation import silu_and_mul
from limpet.backend.layers.attention import PagedAttention
from limpet.backend.layers.linear import Linear, RowParallelLinear, gate_up_proj
from limpet.backend.layers.norm import HiddenNorm, RMSNorm
from limpet.backend.models.causal_lm import CausalLM
from limpet.backend.ranks.group import RankGroup

LayerCache = tuple[Tensor, Tensor]  # keys, values: [num_blocks, block_size, num_kv_heads, head_dim]
Angles = tuple[Tensor, Tensor]  # cos, sin: [num_tokens, head_dim / 2]


class DecoderLayer(nn.Module):
    """Grouped-query attention and a gated MLP, each behind a norm; parameter names are the checkpoint's."""

    def __init__(self, config: ModelConfig, ranks: RankGroup) -> None:
        super().__init__()
        hidden, eps, self.head_dim = config.hidden_size, config.rms_norm_eps, config.head_dim
        heads, kv_heads = ranks.part(config.num_heads), ranks.part_or_shared(config.num_kv_heads)
        self.num_heads, self.num_kv_heads = len(heads), len(kv_heads)
        self.input_norm = HiddenNorm(ranks, hidden, eps)
        self.qkv_proj = _qkv_proj(config, heads, kv_heads)
        self.q_norm = RMSNorm(self.head_dim, eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps) if config.qk_norm else None
        self.paged_attention = PagedAttention(self.head_dim**-0.5)
        self.o_proj = RowParallelLinear(ranks, config.num_heads * self.head_dim, hidden, bias=config.o_bias)
        self.post_attention_norm = HiddenNorm(ranks, hidden, eps)
        self.gate_up_proj = gate_up_proj(ranks, hidden, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = RowParallelLinear(ranks, config.intermediate_size, hidden, bias=config.mlp_bias)

    def forward(
        self, x: Tensor, residual: Tensor, angles: Angles, cache: LayerCache, step: AttentionMetadata
    ) -> Tensor:
        """x [num_tokens, hidden] is added to `residual` in place; returns what the next norm adds to it."""
        x = self._attention(self.input_norm(x, residual), angles, cache, step)
        return self._mlp(self.post_attention_norm(x, residual))

    def _attention(self, x: Tensor, angles: Angles, cache: LayerCache, step: AttentionMetadata) -> Tensor:
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)  # [num_tokens, q + k + v heads, head_dim]
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(heads[:, : self.num_heads])
            k = self.k_norm(heads[:, self.num_heads : self.num_heads + self.num_kv_heads])
            heads = torch.cat((q, k, heads[:, self.num_heads + self.num_kv_heads :]), dim=1)
        out = self.paged_attention(heads, angles, cache, step)  # [num_tokens, num_heads, head_dim]
        y: Tensor = self.o_proj(out.reshape(x.shape[0], -1))
        return y

    def _mlp(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return y


class LlamaForCausalLM(CausalLM):
    """Layers of grouped-query attention."""

    captures_prefills = True

    def __init__(self, config: ModelConfig, session_len: int, device: torch.device, ranks: RankGroup) -> None:
        layers = [DecoderLayer(config, ranks) for _ in range(config.num_layers)]
        super().__init__(config, layers, session_len, device, ranks)
        num_kv_heads = len(ranks.part_or_shared(config.num_kv_heads))
        self.cache_layout = CacheLayout(config.num_layers, 2, (num_kv_heads, config.head_dim))

    def forward(self, ids: Tensor, positions: Tensor, caches: list[LayerCache], step: AttentionMetadata) -> Tensor:
        """ids and positions [num_tokens] -> hidden states [num_tokens, hidden]."""
        angles = self.rotary.at(positions)
        x = self.embed_tokens(ids)
        residual = torch.zeros_like(x)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, residual, angles, cache, step)
        hidden: Tensor = self.norm(x, residual)
        return hidden


def _qkv_proj(config: ModelConfig, heads: range, kv_heads: range) -> Linear:
    """The rows of these heads."""
    num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
    wanted = (
        heads,
        range(num_heads + kv_heads.start, num_heads + kv_heads.stop),
        range(num_heads + num_kv_heads + kv_heads.start, num_heads + num_kv_heads + kv_heads.stop),
    )
    rows = [range(part.start * config.head_dim, part.stop * config.head_dim) for part in wanted]
    num_rows = (num_heads + 2 * num_kv_heads) * config.head_dim
    return Linear(config.hidden_size, num_rows, bias=config.qkv_bias, outs=rows)
