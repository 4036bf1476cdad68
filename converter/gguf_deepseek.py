"""DeepSeek-V2's own numbers in a GGUF file's metadata (architecture deepseek2), and its layout."""

import msgspec

from limpet.backend.checkpoint import ExpertsConfig, LatentAttentionConfig, ModelConfig, RopeScaling
from limpet.converter.deepseek_config import with_deepseek
from limpet.converter.deepseek_layouts import gguf_deepseek
from limpet.converter.errors import ConversionError
from limpet.converter.gguf_file import GGUFFile
from limpet.converter.gguf_numbers import GGUFNumbers
from limpet.converter.rules import Layout

SOFTMAX = 1  # of llama.cpp's gating functions
# llama.cpp's files of the large DeepSeek-V2 models did not state their groups for a long time: experts, groups, kept.
UNSTATED_GROUPS = {160: (8, 3)}


def complete_gguf_deepseek(numbers: GGUFNumbers, config: ModelConfig) -> ModelConfig:
    """`config` with DeepSeek-V2's attention and experts; raises ConversionError for what is not supported."""
    rope = numbers.integer("rope.dimension_count")
    head_dim = numbers.integer("attention.key_length_mla", numbers.integer("attention.key_length"))
    if head_dim <= rope:
        raise ConversionError(f"The GGUF file's heads have {head_dim} elements, no more than the {rope} rotated ones.")
    latent = LatentAttentionConfig(
        q_lora_rank=numbers.integer("attention.q_lora_rank", 0) or None,
        kv_lora_rank=numbers.integer("attention.kv_lora_rank"),
        qk_nope_head_dim=head_dim - rope,
        qk_rope_head_dim=rope,
        v_head_dim=numbers.integer("attention.value_length_mla", numbers.integer("attention.value_length")),
    )
    scaling = _with_mscale(numbers, config.rope_scaling)
    num_experts = numbers.integer("expert_count", 0)
    experts = _experts(numbers, num_experts) if num_experts else None
    return with_deepseek(msgspec.structs.replace(config, rope_scaling=scaling), latent, experts)


def deepseek_layout(file: GGUFFile, config: ModelConfig) -> Layout:
    splits_kv_b = "blk.0.attn_kv_b.weight" not in file.tensors
    if splits_kv_b and config.num_heads > len(file.tensors):  # each head is a member of a stack
        raise ConversionError(f"The GGUF file states {config.num_heads} heads, and has {len(file.tensors)} tensors.")
    return gguf_deepseek(config, splits_kv_b=splits_kv_b)


def _with_mscale(numbers: GGUFNumbers, scaling: RopeScaling | None) -> RopeScaling | None:
    """YaRN's two corrections, which DeepSeek's models state as equal and llama.cpp keeps as 0.1 times one of them."""
    multiplier = numbers.value("rope.scaling.yarn_log_multiplier", 0.0)
    if scaling is None or not multiplier:
        return scaling
    mscale = 10 * numbers.positive("rope.scaling.yarn_log_multiplier", 0.1)
    return msgspec.structs.replace(scaling, mscale=mscale, mscale_all_dim=mscale)


def _experts(numbers: GGUFNumbers, num_experts: int) -> ExpertsConfig:
    gating = numbers.integer("expert_gating_func", SOFTMAX)
    if gating != SOFTMAX:
        raise ConversionError(f"The GGUF file's expert_gating_func is {gating}; only {SOFTMAX}, softmax, is supported.")
    groups, kept = UNSTATED_GROUPS.get(num_experts, (1, 1))
    return ExpertsConfig(
        num_experts=num_experts,
        num_shared_experts=numbers.integer("expert_shared_count", 0),
        num_experts_per_token=numbers.integer("expert_used_count"),
        intermediate_size=numbers.integer("expert_feed_forward_length"),
        num_dense_layers=numbers.integer("leading_dense_block_count", 0),
        num_groups=numbers.integer("expert_group_count", groups),
        num_groups_per_token=numbers.integer("expert_group_used_count", kept),
        scaling_factor=numbers.positive("expert_weights_scale", 1.0),
        normalizes_weights=bool(numbers.value("expert_weights_norm", False)),
    )
