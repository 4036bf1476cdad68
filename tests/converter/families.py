"""Tiny random models of every supported architecture, in every layout in which they are published."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from limpet.backend.checkpoint import CheckpointDir
from limpet.backend.config import EngineConfig
from limpet.backend.offline import LocalEngine
from limpet.backend.sampling_params import SamplingParams
from tests.aids.ids_equal import assert_ids_equal
from tests.aids.tiny import BASE, WEIGHT_STD, write_tiny
from tests.aids.transformers_reference import greedy_reference
from tests.converter.checkpoints import edit_json, interleave

NUM_TOKENS = 16
PROMPTS: tuple[list[int], ...] = (
    [5],
    [7 * place % 290 for place in range(40)],
    [11 * place % 289 for place in range(480)],
)
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**BASE | changes))


def _rope(kind: str, **parameters: Any) -> PreTrainedModel:
    return _llama(rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **parameters})


FAMILIES = {
    "llama-1": lambda: _llama(num_key_value_heads=6, rms_norm_eps=1e-6),
    "llama-2": lambda: _llama(rms_norm_eps=1e-5),
    "llama-3.1": lambda: _llama(rope_parameters=_LLAMA3_ROPE | {"factor": 8.0}, head_dim=32),
    "llama-3.2": lambda: _llama(rope_parameters=_LLAMA3_ROPE | {"factor": 32.0}, head_dim=32, tie_word_embeddings=True),
    "llama-attention-biases": lambda: _llama(attention_bias=True),
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama-odd-vocabulary": lambda: _llama(vocab_size=301),
    "rope-linear": lambda: _rope("linear", factor=4.0),
    "rope-dynamic": lambda: _rope("dynamic", factor=2.0),
    "rope-yarn": lambda: _rope("yarn", factor=4.0, original_max_position_embeddings=16),
    "rope-yarn-mscale": lambda: _rope(
        "yarn", factor=8.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.3, beta_fast=20.0
    ),
    "rope-yarn-attention-factor": lambda: _rope(
        "yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.3, truncate=False
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**BASE | {"sliding_window": None, "head_dim": 16})),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_without_head_dim())),
    "qwen2-tied": lambda: Qwen2ForCausalLM(Qwen2Config(**_without_head_dim() | {"tie_word_embeddings": True})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**BASE | {"head_dim": 16})),
    "quantisable": lambda: _llama(hidden_size=96, intermediate_size=96, head_dim=16),  # rows of whole blocks
    "meta": lambda: _llama(vocab_size=600, rms_norm_eps=1e-5),  # rows for a SentencePiece vocabulary
    "llama-3-meta": lambda: _llama(
        vocab_size=656,  # rows for 400 ranks and 256 special tokens
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    ),
    "llama-3.1-meta": lambda: _llama_3_meta(8.0),
    "llama-3.2-meta": lambda: _llama_3_meta(32.0, tie_word_embeddings=True),
    "qwen3-biases": lambda: Qwen3ForCausalLM(Qwen3Config(**BASE | {"head_dim": 16, "attention_bias": True})),
}


def _llama_3_meta(factor: float, **changes: Any) -> PreTrainedModel:
    """Heads of hidden size / number, as Meta's code has them: wide ones, that have low frequencies to scale."""
    heads = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}
    return _llama(
        vocab_size=656, rope_parameters=_LLAMA3_ROPE | {"factor": factor}, rms_norm_eps=1e-5, **heads, **changes
    )


def build(family: str) -> PreTrainedModel:
    """A float32 model with all parameters random, norms and biases included."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, WEIGHT_STD)
    return model


def write_folder(folder: Path, model: PreTrainedModel, max_shard_size: str = "1GB") -> None:
    """As Hugging Face publishes it, with the tiny models' tokenizer and template."""
    write_tiny(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size=max_shard_size)


def write_bin_folder(folder: Path, model: PreTrainedModel, *, zipped: bool = True) -> None:
    """The same with weights as torch.save wrote them before safetensors."""
    write_folder(folder, model)
    store_as(folder, "bin" if zipped else "old bin")


HF_LAYOUTS = ("safetensors", "sharded safetensors", "bin", "sharded bin", "old bin")


def store_as(folder: Path, layout: str) -> None:
    """Store a folder's model.safetensors in another of HF_LAYOUTS; two shards share the tensors of every layer."""
    if layout == "safetensors":
        return
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem, ending = ("model", "safetensors") if "safetensors" in layout else ("pytorch_model", "bin")

    def save(part: dict[str, torch.Tensor], name: str) -> None:
        if ending == "safetensors":
            save_file(part, folder / name)
        else:
            torch.save(part, folder / name, _use_new_zipfile_serialization=layout != "old bin")

    if "sharded" not in layout:
        save(tensors, f"{stem}.{ending}")
        return
    files = {name: f"{stem}-0000{1 + place % 2}-of-00002.{ending}" for place, name in enumerate(sorted(tensors))}
    for file_name in set(files.values()):
        save({name: tensors[name] for name in tensors if files[name] == file_name}, file_name)
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": files}), "utf-8")


def write_internlm2_folder(folder: Path, model: PreTrainedModel) -> None:
    """A Llama under InternLM2's names, its q, k and v fused head group by head group."""
    write_folder(folder, model)
    config = model.config
    group = config.num_attention_heads // config.num_key_value_heads
    renamed: dict[str, torch.Tensor] = {}
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for layer in range(config.num_hidden_layers):
        attention = f"model.layers.{layer}.self_attn."
        for kind in ("weight", "bias") if config.attention_bias else ("weight",):
            q, k, v = (state.pop(f"{attention}{part}_proj.{kind}").split(config.head_dim) for part in "qkv")
            heads = [[*q[group * head : group * (head + 1)], k[head], v[head]] for head in range(len(k))]
            fused = torch.cat([rows for head in heads for rows in head])
            renamed[f"model.layers.{layer}.attention.wqkv.{kind}"] = fused
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for name, tensor in state.items():
        old = next((old for old in sorted(names, key=len, reverse=True) if old in name), None)
        renamed[name.replace(old, names[old]) if old else name] = tensor
    save_file(renamed, folder / "model.safetensors")
    edit_json(
        folder / "config.json",
        architectures=["InternLM2ForCausalLM"],
        bias=config.attention_bias,
        attention_bias=None,
        model_type="internlm2",
        auto_map={"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"},
    )


def write_meta_folder(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: Path,
    num_parts: int,
    *,
    embedding_by_rows: bool = False,
    **params: Any,
) -> None:
    """As Meta publishes it: rotary pairs interleaved, every matrix cut for the GPUs of its own code.

    `params` are more keys of params.json.
    """
    folder.mkdir(parents=True)
    config = model.config
    content = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "norm_eps": config.rms_norm_eps,
        "vocab_size": -1,
        "multiple_of": 16,
        **params,
    }
    (folder / "params.json").write_text(json.dumps(content), "utf-8")
    shutil.copyfile(tokenizer, folder / "tokenizer.model")
    for part in range(num_parts):
        tensors = {name: _meta_part(name, tensor, part, num_parts, embedding_by_rows) for name, tensor in _meta(model)}
        torch.save(tensors | {"rope.freqs": torch.ones(4)}, folder / f"consolidated.{part:02}.pth")


def _meta(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    names = {
        "model.": "",
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    heads = {"wq": model.config.num_attention_heads, "wk": model.config.num_key_value_heads}
    tensors = []
    for old, tensor in model.state_dict().items():
        if old == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        name = old
        for hf, meta in names.items():
            name = name.replace(hf, meta)
        num_heads = next((heads[key] for key in heads if key in name), None)
        tensors.append((name, torch.from_numpy(interleave(tensor.numpy(), num_heads)) if num_heads else tensor))
    return tensors


def _meta_part(name: str, tensor: torch.Tensor, part: int, num_parts: int, embedding_by_rows: bool) -> torch.Tensor:
    if "norm" in name:
        return tensor.clone()
    by_columns = name.endswith(("wo.weight", "w2.weight")) or (name.startswith("tok") and not embedding_by_rows)
    return tensor.chunk(num_parts, dim=1 if by_columns else 0)[part].clone()


def assert_engine_gives_transformers_ids(model_dir: Path, model: PreTrainedModel) -> None:
    """Load the converted model into the engine and compare its answers with transformers' in float32.

    Prompts that do not fit the model's context are left out.
    """
    room = CheckpointDir(model_dir).model_config().max_position_embeddings - NUM_TOKENS
    with LocalEngine(model_dir, EngineConfig(dtype="float32", max_batch_size=4, cache_bytes=1 << 24)) as engine:

        def generate(prompt: list[int], num_tokens: int) -> list[int]:
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            return engine.generate([prompt], params)[0].ids

        for prompt in (each for each in PROMPTS if len(each) <= room):
            reference = greedy_reference(model, prompt, NUM_TOKENS)
            assert_ids_equal(
                generate(prompt, NUM_TOKENS), reference, prompt=prompt, generate=generate, name=f"{len(prompt)} tokens"
            )


def _without_head_dim() -> dict[str, Any]:
    return {key: value for key, value in BASE.items() if key != "head_dim"}
