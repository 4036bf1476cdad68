"""Tiny random DeepSeek-V2 checkpoints of the real ones' ratios, as transformers saves them.

transformers before 5.15 leaves a factor of YaRN out: nothing may be compared with it.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, PreTrainedModel

from tests.aids.chain_tokenizer import BOS_ID, EOS_ID
from tests.aids.tiny import write_tokenizer

WEIGHT_STD = 0.1
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
LITE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 344,
    "moe_intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 512,
    "rope_parameters": YARN,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
V2 = LITE | {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "n_routed_experts": 20,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 16.0,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
}
DEEPSEEK_SHAPES: dict[str, dict[str, Any]] = {
    "lite": LITE,
    "v2": V2,
    "scaled, one shared expert, no dense layer": LITE
    | {"routed_scaling_factor": 2.5, "n_shared_experts": 1, "first_k_dense_replace": 0},
    "v2, plain rope, three dense layers, odd sizes": V2
    | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "first_k_dense_replace": 3,
        "kv_lora_rank": 40,
        "v_head_dim": 24,
    },
}
TRUE_HEADS: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "routed_scaling_factor": 1.0,  # else one choice that bfloat16 makes otherwise changes everything
}
# For GPUs: heads as the real models have them.
LARGE_SHAPES = {
    "lite, true heads": LITE | TRUE_HEADS | {"n_routed_experts": 64},
    "v2, true heads": V2 | TRUE_HEADS | {"q_lora_rank": 384, "n_routed_experts": 40, "n_group": 8, "topk_group": 3},
}


def build_deepseek(shape: str) -> PreTrainedModel:
    """A float32 model of that shape (DEEPSEEK_SHAPES, LARGE_SHAPES), all parameters random, norms included."""
    model = DeepseekV2ForCausalLM(DeepseekV2Config(**(DEEPSEEK_SHAPES | LARGE_SHAPES)[shape])).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1.0, WEIGHT_STD, generator=generator)
            else:  # a router whose choices are far apart: no test may depend on ties
                parameter.normal_(0.0, 0.5 if "gate.weight" in name else WEIGHT_STD, generator=generator)
    return model


def write_deepseek(folder: Path, shape: str) -> PreTrainedModel:
    """Save such a model with the tiny models' tokenizer and chat template, and return it as the reference."""
    model = build_deepseek(shape)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model
