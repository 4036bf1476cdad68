"""Shapes of well-known models, for measuring with random weights."""

from pathlib import Path

import msgspec

from limpet.backend.checkpoint import CheckpointDir, ModelConfig

LLAMA_2: dict[str, object] = {
    "architecture": "llama",
    "source_architecture": "LlamaForCausalLM",
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "dtype": "bfloat16",
    "eos_token_ids": [2],
}
LLAMA_3 = LLAMA_2 | {"vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0}
QWEN_2 = LLAMA_2 | {"vocab_size": 152064, "max_position_embeddings": 32768, "rope_theta": 1e6, "qkv_bias": True}
QWEN_3 = LLAMA_2 | {"vocab_size": 151936, "max_position_embeddings": 32768, "rope_theta": 1e6, "qk_norm": True}

DEEPSEEK_V2: dict[str, object] = LLAMA_2 | {
    "architecture": "deepseek_v2",
    "source_architecture": "DeepseekV2ForCausalLM",
    "head_dim": 192,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "latent_attention": {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "experts": {
        "num_experts": 160,
        "num_shared_experts": 2,
        "num_experts_per_token": 6,
        "intermediate_size": 1536,
        "num_dense_layers": 1,
        "num_groups": 8,
        "num_groups_per_token": 3,
        "scaling_factor": 16.0,
    },
}
DEEPSEEK_V2_LITE = DEEPSEEK_V2 | {
    "latent_attention": {
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "experts": {
        "num_experts": 64,
        "num_shared_experts": 2,
        "num_experts_per_token": 6,
        "intermediate_size": 1408,
        "num_dense_layers": 1,
    },
}


def _shape(
    family: dict[str, object], hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int
) -> ModelConfig:
    numbers = {
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "intermediate_size": intermediate,
    }
    return msgspec.convert(family | numbers, ModelConfig)


SHAPES = {
    "llama-2-7b": _shape(LLAMA_2, 4096, 32, 32, 32, 11008),
    "llama-2-13b": _shape(LLAMA_2, 5120, 40, 40, 40, 13824),
    "llama-2-70b": _shape(LLAMA_2, 8192, 80, 64, 8, 28672),
    "llama-3-8b": _shape(LLAMA_3, 4096, 32, 32, 8, 14336),
    "qwen2-7b": _shape(QWEN_2, 3584, 28, 28, 4, 18944),
    "qwen3-8b": _shape(QWEN_3, 4096, 36, 32, 8, 12288),
    "deepseek-v2-lite": _shape(DEEPSEEK_V2_LITE, 2048, 27, 16, 16, 10944),
    "deepseek-v2": _shape(DEEPSEEK_V2, 5120, 60, 128, 128, 12288),
    "tiny": _shape(LLAMA_2, 256, 2, 2, 2, 512),  # to try the benchmark itself
}


def write_shape(name: str, folder: Path, num_layers: int | None = None) -> Path:
    """A model's folder with that shape, or so many layers of it, and no weights, for `load_format=dummy`."""
    checkpoint = CheckpointDir(folder / name)
    checkpoint.folder.mkdir(parents=True)
    shape = SHAPES[name]
    if num_layers is not None:
        shape = msgspec.structs.replace(shape, num_layers=num_layers)
    checkpoint.model_path.write_bytes(msgspec.json.encode(shape))
    return checkpoint.root
