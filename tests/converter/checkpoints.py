"""Checkpoints to convert: tiny models in other layouts, and ways to damage them."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from limpet.backend.checkpoint import CheckpointDir
from limpet.converter.cli import main
from limpet.converter.sentencepiece_vocab import Piece
from tests.aids.chain_tokenizer import BOS_ID, EOS_ID, SPECIAL_TOKENS, byte_characters
from tests.aids.tiny import CHAT_TEMPLATE

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def run_convert(source: Path, workspace: Path, *options: str) -> CheckpointDir:
    """The converted model; fails unless the command succeeds."""
    assert main([str(source), "--dst", str(workspace), "--name", "model", *options]) == 0
    return CheckpointDir(workspace / "model_repository" / "model")


def converted_weights(checkpoint: CheckpointDir) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for path in checkpoint.weight_files():
        weights |= load_file(path)
    return weights


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON object; a value of None removes the key."""
    content = json.loads(path.read_text("utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}), "utf-8")


def edit_weights(folder: Path, edit: Any) -> None:
    """Rewrite model.safetensors with what `edit` makes of its tensors, in place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str = "llama",
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    leave_out: tuple[str, ...] = (),
    tokenizer: Tokenizer | None = None,
    sentencepiece: Sequence[Piece] = (),
    split_max_tensors: int = 0,
    metadata: Mapping[str, int | float | str] | None = None,
) -> None:
    """The model as llama.cpp's converter writes it: its names, its q/k order, tokenizer and template as metadata.

    `metadata` is more of the architecture's, by key.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "head_dim"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_rope_scaling(writer, config)
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (metadata or {}).items():
        add[type(value)](f"{architecture}.{key}", value)
    if sentencepiece:
        _add_sentencepiece(writer, sentencepiece)
    elif tokenizer is not None:
        _add_byte_level(writer, tokenizer)
    else:
        add_tiny_tokenizer(writer, leave_out)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            _add_tensor(writer, name, tensor, model, architecture, quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_rope_scaling(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(config))
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", 0) or 512)


def _llama3_divisors(config: Any) -> np.ndarray:
    """From transformers' own frequencies: what they were divided by."""
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
    return (plain / frequencies).numpy().astype(np.float32)


def add_tiny_tokenizer(writer: gguf.GGUFWriter, leave_out: tuple[str, ...]) -> None:
    tokens = [*SPECIAL_TOKENS, *byte_characters().values()]
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS) + [gguf.TokenType.NORMAL] * 256
    if "tokenizer" not in leave_out:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges([])
        writer.add_bos_token_id(BOS_ID)
        writer.add_eos_token_id(EOS_ID)
        writer.add_add_bos_token(False)
        writer.add_chat_template(CHAT_TEMPLATE)
    if "pre" not in leave_out:
        writer.add_tokenizer_pre("gpt-2")


def _add_byte_level(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """As llama.cpp describes a tokenizer.json whose split is SmolLM's."""
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([kinds[added[i].special] if i in added else gguf.TokenType.NORMAL for _, i in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


def _add_sentencepiece(writer: gguf.GGUFWriter, pieces: Sequence[Piece]) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece.text for piece in pieces])
    writer.add_token_scores([piece.score for piece in pieces])
    writer.add_token_types([gguf.TokenType(int(piece.kind)) for piece in pieces])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    tensor: torch.Tensor,
    model: PreTrainedModel,
    architecture: str,
    quantisation: gguf.GGMLQuantizationType,
) -> None:
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    projection = next((heads[key] for key in heads if key in name), None)
    values = tensor.float().numpy()
    if projection is not None and architecture in ("llama", "internlm2"):
        values = interleave(values, projection)
    if values.ndim == 1:
        quantisation = gguf.GGMLQuantizationType.F32
    writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, quantisation), raw_dtype=quantisation)


def interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order: element i of a head's first half, then element i of its second half."""
    head_dim = len(values) // num_heads
    order = [
        head * head_dim + half * head_dim // 2 + element
        for head in range(num_heads)
        for element in range(head_dim // 2)
        for half in (0, 1)
    ]
    return np.ascontiguousarray(values[order])


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    return f"blk.{match[1]}.{_GGUF_NAMES[match[2]]}.{kind}" if match else f"{_GGUF_NAMES[stem]}.{kind}"
