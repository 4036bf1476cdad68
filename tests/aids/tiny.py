"""Tiny random Llama checkpoints as transformers saves them: every shape of the family in milliseconds."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.aids.chain_tokenizer import BOS, BOS_ID, EOS, EOS_ID, SPECIAL_TOKENS, byte_characters

# Wider than transformers' 0.02: logits of so few dimensions would else be ties.
WEIGHT_STD = 0.25
BASE: dict[str, Any] = {
    "vocab_size": 300,  # more rows than the tokenizer has tokens, and no multiple of 64
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
# What each shape changes in BASE.
TINY_SHAPES: dict[str, dict[str, Any]] = {
    "grouped-query": {},
    "multi-head": {"num_key_value_heads": 6},
    "multi-query": {"num_key_value_heads": 1},
    "wide-heads": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "eight-heads": {"num_attention_heads": 8, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "one-layer": {"num_hidden_layers": 1, "rms_norm_eps": 1e-3},
    "rope-linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    "rope-llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "rope_theta": 10000.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|' + message.role + '|>' + message.content -}}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}
"""


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny products run slower on several threads, and much slower when others want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def build_tiny(shape: str = "grouped-query", *, seed: int = 0) -> PreTrainedModel:
    """A float32 model of that shape; all parameters are random, biases and norms included."""
    model = LlamaForCausalLM(LlamaConfig(**BASE | TINY_SHAPES[shape])).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.normal_(mean, WEIGHT_STD, generator=generator)
    return model


def write_tiny(
    folder: Path, shape: str = "grouped-query", *, seed: int = 0, max_shard_size: str = "1GB"
) -> PreTrainedModel:
    """Save such a model with a byte-level tokenizer and a chat template, and return it as the reference."""
    model = build_tiny(shape, seed=seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer and a chat template, as transformers saves them."""
    _build_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), "utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")


def _build_tokenizer() -> Tokenizer:
    tokens = [*SPECIAL_TOKENS, *byte_characters().values()]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer
