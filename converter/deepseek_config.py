"""DeepSeek-V2's own numbers in a Hugging Face config.json."""

from collections.abc import Mapping
from typing import Any

import msgspec

from limpet.backend.checkpoint import ExpertsConfig, LatentAttentionConfig, ModelConfig
from limpet.converter.errors import ConversionError
from limpet.converter.text_file import Count, Positive, as_record

TOPK_METHODS = ("greedy", "group_limited_greedy")


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    """Keys beside those that every architecture has; absent ones have the values of DeepSeek's own configuration."""

    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count
    q_lora_rank: Count | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    n_routed_experts: Count | None = None
    n_shared_experts: int | None = None
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Count | None = None
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    scoring_func: str = "softmax"
    topk_method: str = "greedy"
    n_group: Count | None = None
    topk_group: Count | None = None
    routed_scaling_factor: Positive = 1.0
    norm_topk_prob: bool = False


def complete_deepseek(keys: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """`config` with DeepSeek-V2's attention and experts; raises ConversionError for what is not supported."""
    own = as_record(keys, _Config, "config.json")
    latent = LatentAttentionConfig(
        q_lora_rank=own.q_lora_rank,
        kv_lora_rank=own.kv_lora_rank,
        qk_nope_head_dim=own.qk_nope_head_dim,
        qk_rope_head_dim=own.qk_rope_head_dim,
        v_head_dim=own.v_head_dim,
    )
    _refuse_unsupported(own)
    experts = None if own.n_routed_experts is None else _experts(own, own.n_routed_experts)
    return with_deepseek(config, latent, experts)


def with_deepseek(config: ModelConfig, latent: LatentAttentionConfig, experts: ExpertsConfig | None) -> ModelConfig:
    """`config` as a deepseek_v2; raises ConversionError for numbers that do not fit together."""
    if latent.qk_rope_head_dim % 2:
        raise ConversionError(
            f"The rotary part of a head has {latent.qk_rope_head_dim} elements; it needs an even number."
        )
    scaling = config.rope_scaling
    if scaling is not None and (scaling.mscale is None) != (scaling.mscale_all_dim is None):
        raise ConversionError("The rope scaling states one of mscale and mscale_all_dim; both are needed, or none.")
    if experts is not None:
        _require_routable(experts)
    return msgspec.structs.replace(
        config,
        architecture="deepseek_v2",
        num_kv_heads=config.num_heads,
        head_dim=latent.qk_nope_head_dim + latent.qk_rope_head_dim,
        latent_attention=latent,
        experts=experts,
    )


def _refuse_unsupported(own: _Config) -> None:
    if own.attention_bias or own.mlp_bias:
        raise ConversionError("config.json asks for biases, which DeepSeek-V2 lacks: not supported.")
    if own.n_routed_experts is None:
        return
    if own.scoring_func != "softmax":
        raise ConversionError(f"config.json has scoring_func {own.scoring_func!r}; only softmax is supported.")
    if own.topk_method not in TOPK_METHODS:
        raise ConversionError(
            f"config.json has topk_method {own.topk_method!r}; supported are {' and '.join(TOPK_METHODS)}."
        )
    if own.moe_layer_freq != 1:
        raise ConversionError(f"config.json has moe_layer_freq {own.moe_layer_freq}; only 1 is supported.")


def _experts(own: _Config, num_experts: int) -> ExpertsConfig:
    is_grouped = own.topk_method == "group_limited_greedy"
    required = ["num_experts_per_tok", "moe_intermediate_size", *(["n_group", "topk_group"] if is_grouped else [])]
    missing = [name for name in required if getattr(own, name) is None]
    if missing:
        raise ConversionError(f"config.json lacks the number {missing[0]}.")
    return ExpertsConfig(
        num_experts=num_experts,
        num_shared_experts=own.n_shared_experts or 0,
        num_experts_per_token=own.num_experts_per_tok or 0,
        intermediate_size=own.moe_intermediate_size or 0,
        num_dense_layers=own.first_k_dense_replace,
        num_groups=(own.n_group or 1) if is_grouped else 1,
        num_groups_per_token=(own.topk_group or 1) if is_grouped else 1,
        scaling_factor=own.routed_scaling_factor,
        normalizes_weights=own.norm_topk_prob,
    )


def _require_routable(experts: ExpertsConfig) -> None:
    if experts.num_experts % experts.num_groups:
        raise ConversionError(f"{experts.num_experts} experts cannot be put into {experts.num_groups} equal groups.")
    if experts.num_groups_per_token > experts.num_groups:
        raise ConversionError(f"A token cannot have {experts.num_groups_per_token} of {experts.num_groups} groups.")
    in_reach = experts.num_experts // experts.num_groups * experts.num_groups_per_token
    if experts.num_experts_per_token > in_reach:
        raise ConversionError(f"A token cannot go to {experts.num_experts_per_token} of {in_reach} experts.")
    if experts.num_shared_experts < 0 or experts.num_dense_layers < 0:
        raise ConversionError("The numbers of shared experts and of dense layers cannot be negative.")
