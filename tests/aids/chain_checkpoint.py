"""Writers of the chain checkpoint: the converted format, and a Hugging Face folder for the converter."""

import hashlib
import json
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save_file

from limpet.backend.checkpoint import (
    FORMAT_VERSION,
    CheckpointDir,
    FileEntry,
    Manifest,
    ModelConfig,
    TokenizerConfig,
)
from tests.aids.chain import HIDDEN_SIZE, LOGIT_SCALE, Floats, codes, next_tokens
from tests.aids.chain_tokenizer import BOS, BOS_ID, CHAT_TEMPLATE, EOS, EOS_ID, build_tokenizer, vocabulary

CONFIG = ModelConfig(
    architecture="llama",
    source_architecture="LlamaForCausalLM",
    hidden_size=HIDDEN_SIZE,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    intermediate_size=64,
    vocab_size=len(vocabulary()),
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    bos_token_id=BOS_ID,
    eos_token_ids=(EOS_ID,),
)
QUERY_ROWS = CONFIG.num_heads * CONFIG.head_dim
KEY_ROWS = CONFIG.num_kv_heads * CONFIG.head_dim


def write_chain_checkpoint(model_dir: Path) -> CheckpointDir:
    """Write the converted model into the new folder `model_dir`, for engines that need no config.pbtxt."""
    checkpoint = CheckpointDir(model_dir)
    checkpoint.folder.mkdir(parents=True)
    weights = _converted_weights()
    save_file(weights, checkpoint.folder / "weights-00001-of-00001.safetensors")
    checkpoint.model_path.write_bytes(msgspec.json.encode(CONFIG))
    build_tokenizer().save(str(checkpoint.tokenizer_path))
    tokenizer_config = TokenizerConfig(bos_token=BOS, eos_token=EOS, add_bos=True)
    checkpoint.tokenizer_config_path.write_bytes(msgspec.json.encode(tokenizer_config))
    checkpoint.chat_template_path.write_text(CHAT_TEMPLATE, "utf-8")
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        limpet_version="0",
        source="chain",
        num_parameters=sum(weight.size for weight in weights.values()),
        files={path.name: _file_entry(path) for path in sorted(checkpoint.folder.iterdir())},
    )
    checkpoint.manifest_path.write_bytes(msgspec.json.encode(manifest))
    return checkpoint


def write_chain_huggingface(folder: Path) -> None:
    """Write the same model into the new folder `folder` as transformers' save_pretrained would."""
    folder.mkdir(parents=True)
    save_file(_huggingface_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")
    _write_json(folder / "config.json", _huggingface_config())
    _write_json(folder / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)


def _huggingface_config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": CONFIG.hidden_size,
        "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": CONFIG.num_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "head_dim": CONFIG.head_dim,
        "intermediate_size": CONFIG.intermediate_size,
        "vocab_size": CONFIG.vocab_size,
        "max_position_embeddings": CONFIG.max_position_embeddings,
        "rms_norm_eps": CONFIG.rms_norm_eps,
        "rope_theta": CONFIG.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "dtype": "float32",
    }


def _converted_weights() -> dict[str, Floats]:
    layer = {
        "input_norm": _norm(),
        "post_attention_norm": _norm(),
        "qkv_proj": _zeros(QUERY_ROWS + 2 * KEY_ROWS, HIDDEN_SIZE),
        "o_proj": _zeros(HIDDEN_SIZE, QUERY_ROWS),
        "gate_up_proj": _zeros(2 * CONFIG.intermediate_size, HIDDEN_SIZE),
        "down_proj": _zeros(HIDDEN_SIZE, CONFIG.intermediate_size),
    }
    outer = {"embed_tokens": codes()[next_tokens()], "norm": _norm(LOGIT_SCALE), "lm_head": codes()}
    named = outer | {f"layers.0.{name}": weight for name, weight in layer.items()}
    return {f"{name}.weight": weight for name, weight in named.items()}


def _huggingface_weights() -> dict[str, Floats]:
    layer = {
        "input_layernorm": _norm(),
        "post_attention_layernorm": _norm(),
        "self_attn.q_proj": _zeros(QUERY_ROWS, HIDDEN_SIZE),
        "self_attn.k_proj": _zeros(KEY_ROWS, HIDDEN_SIZE),
        "self_attn.v_proj": _zeros(KEY_ROWS, HIDDEN_SIZE),
        "self_attn.o_proj": _zeros(HIDDEN_SIZE, QUERY_ROWS),
        "mlp.gate_proj": _zeros(CONFIG.intermediate_size, HIDDEN_SIZE),
        "mlp.up_proj": _zeros(CONFIG.intermediate_size, HIDDEN_SIZE),
        "mlp.down_proj": _zeros(HIDDEN_SIZE, CONFIG.intermediate_size),
    }
    outer = {"model.embed_tokens": codes()[next_tokens()], "model.norm": _norm(LOGIT_SCALE), "lm_head": codes()}
    named = outer | {f"model.layers.0.{name}": weight for name, weight in layer.items()}
    return {f"{name}.weight": weight for name, weight in named.items()}


def _norm(value: float = 1.0) -> Floats:
    return np.full(HIDDEN_SIZE, value, dtype=np.float32)


def _zeros(rows: int, columns: int) -> Floats:
    return np.zeros((rows, columns), dtype=np.float32)


def _file_entry(path: Path) -> FileEntry:
    return FileEntry(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2), "utf-8")
