"""Random models with the head sizes and groups of real families, few layers and a small vocabulary."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from limpet.converter.convert import convert
from limpet.converter.plan import Options, make_plan
from tests.aids.deepseek import YARN
from tests.aids.tiny import write_tokenizer
from tests.aids.tiny_models import ConvertedTiny

BASE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
# Every token goes to all experts: a choice that rounding changes would be a large error (test_experts.py has choices).
DEEPSEEK: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 6,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 192,
    "first_k_dense_replace": 1,
    "rope_parameters": YARN,
}
FAMILIES: dict[str, tuple[Callable[..., PretrainedConfig], dict[str, Any]]] = {
    "llama-2": (LlamaConfig, {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "llama-3": (LlamaConfig, {"num_attention_heads": 8, "num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE}),
    "qwen2": (Qwen2Config, {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 896}),
    "deepseek-v2-lite": (DeepseekV2Config, DEEPSEEK),
    "deepseek-v2": (
        DeepseekV2Config,
        DEEPSEEK | {"num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 384},
    ),
    "qwen3": (Qwen3Config, {"num_attention_heads": 8, "num_key_value_heads": 4}),
}


def convert_family(folder: Path, family: str) -> ConvertedTiny:
    """Write a random float32 model of that family into `folder` and convert it there."""
    kind, changes = FAMILIES[family]
    model: PreTrainedModel = AutoModelForCausalLM.from_config(kind(**BASE | changes), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.normal_(mean, 0.05, generator=generator)  # biases and norms too
    model.save_pretrained(folder / "source")
    write_tokenizer(folder / "source")
    plan = make_plan(Options(source=folder / "source", workspace=folder, name="model"))
    convert(plan, lambda num_bytes: None)
    return ConvertedTiny(plan.target, model)
