"""Opening a GGUF file as a source: architecture numbers from its metadata."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from limpet.backend.checkpoint import ModelConfig, RopeScaling
from limpet.converter.errors import ConversionError
from limpet.converter.gguf_file import GGUFFile
from limpet.converter.gguf_tokenizer import read_gguf_tokenizer
from limpet.converter.layouts import GGUF_HALF_SPLIT, GGUF_INTERLEAVED
from limpet.converter.rope import context_limit, llama3_divisors
from limpet.converter.source import Source

# llama.cpp stores q and k rows interleaved for the architectures whose rotary embedding it applies to pairs (2i, 2i+1).
_LAYOUTS = {
    "llama": GGUF_INTERLEAVED,
    "internlm2": GGUF_INTERLEAVED,
    "qwen2": GGUF_HALF_SPLIT,
    "qwen3": GGUF_HALF_SPLIT,
}


def open_gguf(path: Path) -> Source:
    """Read a GGUF file's header; raises ConversionError for what Limpet cannot serve."""
    file = GGUFFile(path)
    architecture = str(file.require("general.architecture"))
    if architecture not in _LAYOUTS:
        raise ConversionError(
            f"GGUF architecture {architecture!r} is not supported; known are {', '.join(sorted(_LAYOUTS))}."
        )
    tokenizer = read_gguf_tokenizer(file.metadata)
    config = _GGUFConfig(file, architecture).model_config()
    kind = f"GGUF file, {file.main_type()}"
    return Source(kind, re.sub(r"-\d{5}-of-\d{5}$", "", path.stem), config, _LAYOUTS[architecture], file, tokenizer)


class _GGUFConfig:
    """Architecture numbers under the keys `ARCHITECTURE.*`."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file = file
        self._architecture = architecture

    def model_config(self) -> ModelConfig:
        self._refuse_unsupported()
        tensors = self._file.tensors
        scaling = self._rope_scaling()
        return ModelConfig(
            architecture="llama",
            source_architecture=self._architecture,
            hidden_size=self._int("embedding_length"),
            num_layers=self._int("block_count"),
            num_heads=self._int("attention.head_count"),
            num_kv_heads=self._int("attention.head_count_kv", self._int("attention.head_count")),
            head_dim=self._head_dim(),
            intermediate_size=self._int("feed_forward_length"),
            vocab_size=self._vocab_size(),
            max_position_embeddings=context_limit(self._int("context_length"), scaling),
            rms_norm_eps=self._float("attention.layer_norm_rms_epsilon", 1e-5),
            rope_theta=self._float("rope.freq_base", 10000.0),
            rope_scaling=scaling,
            tie_word_embeddings="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            o_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            sliding_window=self._int("attention.sliding_window", 0) or None,
            bos_token_id=self._file.metadata.get("tokenizer.ggml.bos_token_id"),  # read_gguf_tokenizer has checked it
        )

    def _int(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or not (default == 0 or 0 < value < 1 << 31):
            raise ConversionError(f"The GGUF file's {key} is {value!r}; one positive integer is needed.")
        return value

    def _float(self, key: str, default: float) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConversionError(f"The GGUF file's {key} is {value!r}; a positive number is needed.")
        # Stored as float32: the shortest decimal that rounds to it is what the model's authors wrote.
        return float(str(np.float32(value)))

    def _value(self, key: str, default: float | None) -> Any:
        full = f"{self._architecture}.{key}"
        return self._file.require(full) if default is None else self._file.metadata.get(full, default)

    def _head_dim(self) -> int:
        return self._int("attention.key_length", self._int("embedding_length") // self._int("attention.head_count"))

    def _vocab_size(self) -> int:
        if "token_embd.weight" not in self._file.tensors:
            raise ConversionError("The GGUF file lacks the tensor token_embd.weight.")
        return self._file.tensors["token_embd.weight"].shape[0]

    def _refuse_unsupported(self) -> None:
        if self._int("expert_count", 0) > 0:
            raise ConversionError(
                "The GGUF file is a mixture of experts, which is not supported for this architecture."
            )
        head_dim = self._head_dim()
        for key in ("rope.dimension_count", "attention.value_length"):
            if self._int(key, head_dim) != head_dim:
                raise ConversionError(f"The GGUF file's {key} differs from the head size {head_dim}: not supported.")

    def _rope_scaling(self) -> RopeScaling | None:
        kind = self._file.metadata.get(f"{self._architecture}.rope.scaling.type", "none")
        if "rope_freqs.weight" in self._file.tensors:
            return self._llama3_scaling()
        old_linear_factor = self._float("rope.scale_linear", 1.0)  # before there was rope.scaling.type
        if kind == "none" and old_linear_factor != 1.0:
            kind = "linear"
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise ConversionError(f"The GGUF file's rope scaling {kind!r} is not supported; known are linear, yarn.")
        self._refuse_yarn_changes()
        return RopeScaling(
            rope_type=kind,
            factor=self._float("rope.scaling.factor", old_linear_factor),
            original_max_position_embeddings=self._int(
                "rope.scaling.original_context_length", self._int("context_length")
            ),
            beta_fast=self._float("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self._float("rope.scaling.yarn_beta_slow", 1.0),
        )

    def _refuse_yarn_changes(self) -> None:
        """Raises ConversionError for a factor that changes YaRN in a way of llama.cpp's own."""
        for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
            key = f"rope.scaling.{name}"
            value = self._file.metadata.get(f"{self._architecture}.{key}", 1.0)
            if value != 1.0:
                raise ConversionError(f"The GGUF file's {key} is {value!r}: not supported; allowed is 1.")

    def _llama3_scaling(self) -> RopeScaling:
        """Llama 3's scaling, which GGUF keeps as its result only: a divisor for every frequency.

        Raises ConversionError if the divisors are not those of Llama 3's own constants.
        """
        divisors = self._file.read("rope_freqs.weight")
        scaling = RopeScaling(
            rope_type="llama3",
            factor=float(divisors.max()),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        )
        expected = llama3_divisors(scaling, self._float("rope.freq_base", 10000.0), self._head_dim())
        if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-3):
            raise ConversionError("The GGUF file's rope_freqs.weight is not Llama 3's rope scaling: not supported.")
        return scaling
