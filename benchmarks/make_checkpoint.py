"""A Hugging Face folder of a model's true shape and random weights (normal, 0.02; norms 1): to convert, load, serve.

python -m benchmarks.make_checkpoint llama-2-7b /tmp/llama-2-7b
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from limpet.backend.checkpoint import LatentAttentionConfig, ModelConfig
from limpet.benchmarks.model_shapes import SHAPES

LAYERS_PER_FILE = 8
BOS, EOS = "<s>", "</s>"
# A turn is one text between marks, as in real templates.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_checkpoint(config: ModelConfig, folder: Path) -> None:
    """Configuration, tokenizer and bfloat16 weights in files of some layers each."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_settings(config)), "utf-8")
    _write_tokenizer(config.vocab_size, folder)
    places: dict[str, str] = {}
    for number, tensors in enumerate(_files(config), start=1):
        name = f"model-{number:05}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        places |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}), "utf-8")


def _settings(config: ModelConfig) -> dict[str, object]:
    settings: dict[str, object] = {
        "architectures": [config.source_architecture],
        "model_type": config.architecture,
        "torch_dtype": "bfloat16",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if config.rope_scaling is not None:
        settings["rope_scaling"] = msgspec.to_builtins(config.rope_scaling)
    latent, experts = config.latent_attention, config.experts
    if latent is None or experts is None:
        return settings | {"head_dim": config.head_dim}
    return settings | {
        **msgspec.to_builtins(latent),
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": experts.num_shared_experts,
        "num_experts_per_tok": experts.num_experts_per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "first_k_dense_replace": experts.num_dense_layers,
        "topk_method": "greedy" if experts.num_groups == 1 else "group_limited_greedy",
        "n_group": experts.num_groups,
        "topk_group": experts.num_groups_per_token,
        "routed_scaling_factor": experts.scaling_factor,
    }


def _files(config: ModelConfig) -> Iterator[dict[str, Tensor]]:
    hidden = config.hidden_size
    yield {
        "model.embed_tokens.weight": _noise(config.vocab_size, hidden),
        "model.norm.weight": _ones(hidden),
        "lm_head.weight": _noise(config.vocab_size, hidden),
    }
    for first in range(0, config.num_layers, LAYERS_PER_FILE):
        layers = range(first, min(first + LAYERS_PER_FILE, config.num_layers))
        yield {
            f"model.layers.{layer}.{name}": tensor for layer in layers for name, tensor in _layer(config, layer).items()
        }


def _layer(config: ModelConfig, layer: int) -> dict[str, Tensor]:
    hidden, experts = config.hidden_size, config.experts
    tensors = {
        "input_layernorm.weight": _ones(hidden),
        "post_attention_layernorm.weight": _ones(hidden),
        "self_attn.o_proj.weight": _noise(hidden, _value_columns(config)),
        **(
            _attention(config)
            if config.latent_attention is None
            else _latent_attention(config, config.latent_attention)
        ),
    }
    if experts is None or layer < experts.num_dense_layers:
        return tensors | _mlp("mlp", hidden, config.intermediate_size)
    for expert in range(experts.num_experts):
        tensors |= _mlp(f"mlp.experts.{expert}", hidden, experts.intermediate_size)
    shared = _mlp("mlp.shared_experts", hidden, experts.num_shared_experts * experts.intermediate_size)
    return tensors | shared | {"mlp.gate.weight": _noise(experts.num_experts, hidden)}


def _attention(config: ModelConfig) -> dict[str, Tensor]:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "self_attn.q_proj.weight": _noise(queries, config.hidden_size),
        "self_attn.k_proj.weight": _noise(keys, config.hidden_size),
        "self_attn.v_proj.weight": _noise(keys, config.hidden_size),
    }


def _latent_attention(config: ModelConfig, latent: LatentAttentionConfig) -> dict[str, Tensor]:
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    columns = config.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    tensors = {
        "self_attn.kv_a_proj_with_mqa.weight": _noise(latent.row_dim, hidden),
        "self_attn.kv_a_layernorm.weight": _ones(latent.kv_lora_rank),
        "self_attn.kv_b_proj.weight": _noise(columns, latent.kv_lora_rank),
    }
    if latent.q_lora_rank is None:
        return tensors | {"self_attn.q_proj.weight": _noise(queries, hidden)}
    return tensors | {
        "self_attn.q_a_proj.weight": _noise(latent.q_lora_rank, hidden),
        "self_attn.q_a_layernorm.weight": _ones(latent.q_lora_rank),
        "self_attn.q_b_proj.weight": _noise(queries, latent.q_lora_rank),
    }


def _value_columns(config: ModelConfig) -> int:
    latent = config.latent_attention
    return config.num_heads * (config.head_dim if latent is None else latent.v_head_dim)


def _mlp(name: str, hidden: int, intermediate: int) -> dict[str, Tensor]:
    return {
        f"{name}.gate_proj.weight": _noise(intermediate, hidden),
        f"{name}.up_proj.weight": _noise(intermediate, hidden),
        f"{name}.down_proj.weight": _noise(hidden, intermediate),
    }


def _ones(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


def _noise(*shape: int) -> Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02).cpu()


def _write_tokenizer(vocab_size: int, folder: Path) -> None:
    """Byte-level: the bytes, then words of three of them up to the vocabulary's size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = [f"{a}{b}{c}{d}" for a in letters for b in letters for c in letters for d in letters]
    tokens = ["<unk>", BOS, EOS, *alphabet, *words][:vocab_size]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", BOS, EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.make_checkpoint")
    parser.add_argument("model", choices=[name for name in SHAPES if not name.startswith("qwen")])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_checkpoint(SHAPES[arguments.model], arguments.folder)


if __name__ == "__main__":
    main()
