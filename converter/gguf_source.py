"""Opening a GGUF file as a source: architecture numbers from its metadata."""

import re
from collections.abc import Callable
from pathlib import Path

import torch

from limpet.backend.checkpoint import ModelConfig, RopeScaling
from limpet.converter.errors import ConversionError
from limpet.converter.gguf_deepseek import complete_gguf_deepseek, deepseek_layout
from limpet.converter.gguf_file import GGUFFile
from limpet.converter.gguf_numbers import GGUFNumbers
from limpet.converter.gguf_tokenizer import read_gguf_tokenizer
from limpet.converter.layouts import GGUF_HALF_SPLIT, GGUF_INTERLEAVED
from limpet.converter.rope import context_limit, llama3_divisors
from limpet.converter.rules import Layout, require_enough_tensors
from limpet.converter.source import Source

DEEPSEEK = "deepseek2"
_WINDOW_KEY = "attention.sliding_window"
# llama.cpp's files of Mistral 7B v0.1 and of what was made from it state a context of 32k and not the window. Llama 3
# 8B has the same numbers of everything but the rotary base.
_MISTRAL_V01 = {
    "embedding_length": 4096,
    "block_count": 32,
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
    "feed_forward_length": 14336,
}
_MISTRAL_V01_THETA, _MISTRAL_V01_WINDOW = 10000.0, 4096
_UNSTATED_WINDOW = (
    f"The GGUF file states no sliding window, but has the numbers of Mistral 7B v0.1, whose window is "
    f"{_MISTRAL_V01_WINDOW} tokens."
)
# llama.cpp stores q and k rows interleaved for the architectures whose rotary embedding it applies to pairs (2i, 2i+1).
_LAYOUTS: dict[str, Callable[[GGUFFile, ModelConfig], Layout]] = {
    "llama": lambda file, config: GGUF_INTERLEAVED,
    "internlm2": lambda file, config: GGUF_INTERLEAVED,
    "qwen2": lambda file, config: GGUF_HALF_SPLIT,
    "qwen3": lambda file, config: GGUF_HALF_SPLIT,
    DEEPSEEK: deepseek_layout,
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
    require_enough_tensors(config, file.tensors)
    kind = f"GGUF file, {file.main_type()}"
    name, layout = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem), _LAYOUTS[architecture](file, config)
    warnings = (_UNSTATED_WINDOW,) if config.sliding_window and not _states_window(file, architecture) else ()
    return Source(kind, name, config, layout, file, tokenizer, warnings)


def _states_window(file: GGUFFile, architecture: str) -> bool:
    return f"{architecture}.{_WINDOW_KEY}" in file.metadata


class _GGUFConfig:
    """Architecture numbers under the keys `ARCHITECTURE.*`."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file = file
        self._architecture = architecture
        self._numbers = GGUFNumbers(file, architecture)

    def model_config(self) -> ModelConfig:
        if self._architecture != DEEPSEEK:
            self._refuse_unsupported()
        tensors = self._file.tensors
        scaling = self._rope_scaling()
        config = ModelConfig(
            architecture="llama",
            source_architecture=self._architecture,
            hidden_size=self._numbers.integer("embedding_length"),
            num_layers=self._numbers.integer("block_count"),
            num_heads=self._numbers.integer("attention.head_count"),
            num_kv_heads=self._numbers.integer(
                "attention.head_count_kv", self._numbers.integer("attention.head_count")
            ),
            head_dim=self._head_dim(),
            intermediate_size=self._numbers.integer("feed_forward_length"),
            vocab_size=self._vocab_size(),
            max_position_embeddings=context_limit(self._numbers.integer("context_length"), scaling),
            rms_norm_eps=self._numbers.positive("attention.layer_norm_rms_epsilon", 1e-5),
            rope_theta=self._numbers.positive("rope.freq_base", 10000.0),
            rope_scaling=scaling,
            tie_word_embeddings="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            o_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            sliding_window=self._sliding_window(scaling),
            bos_token_id=self._file.metadata.get("tokenizer.ggml.bos_token_id"),  # read_gguf_tokenizer has checked it
        )
        return complete_gguf_deepseek(self._numbers, config) if self._architecture == DEEPSEEK else config

    def _sliding_window(self, scaling: RopeScaling | None) -> int | None:
        if _states_window(self._file, self._architecture):
            return self._numbers.integer(_WINDOW_KEY, 0) or None
        numbers = {key: self._file.metadata.get(f"{self._architecture}.{key}") for key in _MISTRAL_V01}
        theta = self._numbers.positive("rope.freq_base", 10000.0)
        is_mistral = numbers == _MISTRAL_V01 and theta == _MISTRAL_V01_THETA and scaling is None
        return _MISTRAL_V01_WINDOW if is_mistral and self._architecture == "llama" else None

    def _head_dim(self) -> int:
        return self._numbers.integer(
            "attention.key_length",
            self._numbers.integer("embedding_length") // self._numbers.integer("attention.head_count"),
        )

    def _vocab_size(self) -> int:
        if "token_embd.weight" not in self._file.tensors:
            raise ConversionError("The GGUF file lacks the tensor token_embd.weight.")
        return self._file.tensors["token_embd.weight"].shape[0]

    def _refuse_unsupported(self) -> None:
        if self._numbers.integer("expert_count", 0) > 0:
            raise ConversionError(
                "The GGUF file is a mixture of experts, which is not supported for this architecture."
            )
        head_dim = self._head_dim()
        for key in ("rope.dimension_count", "attention.value_length"):
            if self._numbers.integer(key, head_dim) != head_dim:
                raise ConversionError(f"The GGUF file's {key} differs from the head size {head_dim}: not supported.")

    def _rope_scaling(self) -> RopeScaling | None:
        kind = self._file.metadata.get(f"{self._architecture}.rope.scaling.type", "none")
        if "rope_freqs.weight" in self._file.tensors:
            return self._llama3_scaling()
        old_linear_factor = self._numbers.positive("rope.scale_linear", 1.0)  # before there was rope.scaling.type
        if kind == "none" and old_linear_factor != 1.0:
            kind = "linear"
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise ConversionError(f"The GGUF file's rope scaling {kind!r} is not supported; known are linear, yarn.")
        self._refuse_yarn_changes()
        return RopeScaling(
            rope_type=kind,
            factor=self._numbers.positive("rope.scaling.factor", old_linear_factor),
            original_max_position_embeddings=self._numbers.integer(
                "rope.scaling.original_context_length", self._numbers.integer("context_length")
            ),
            beta_fast=self._numbers.positive("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self._numbers.positive("rope.scaling.yarn_beta_slow", 1.0),
        )

    def _refuse_yarn_changes(self) -> None:
        """Raises ConversionError for a factor that changes YaRN in a way of llama.cpp's own."""
        names = ["attn_factor", "yarn_attn_factor", "yarn_ext_factor"]
        for name in names if self._architecture == DEEPSEEK else [*names, "yarn_log_multiplier"]:
            key = f"rope.scaling.{name}"
            value = self._file.metadata.get(f"{self._architecture}.{key}", 1.0)
            if value != 1.0:
                raise ConversionError(f"The GGUF file's {key} is {value!r}: not supported; allowed is 1.")

    def _llama3_scaling(self) -> RopeScaling:
        """Llama 3's scaling, which GGUF keeps as its result only: a divisor for every frequency.

        Raises ConversionError if the divisors are not those of Llama 3's own constants.
        """
        divisors, head_dim = self._file.read("rope_freqs.weight"), self._head_dim()
        scaling = RopeScaling(
            rope_type="llama3",
            factor=float(divisors.max()),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        )
        theta = self._numbers.positive("rope.freq_base", 10000.0)
        if divisors.shape != (head_dim // 2,) or not torch.allclose(
            divisors, llama3_divisors(scaling, theta, head_dim), rtol=1e-3
        ):
            raise ConversionError("The GGUF file's rope_freqs.weight is not Llama 3's rope scaling: not supported.")
        return scaling
