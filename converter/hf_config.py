"""Architecture numbers from a Hugging Face config.json."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

import msgspec

from limpet.backend.checkpoint import DType, ModelConfig
from limpet.converter.deepseek_config import complete_deepseek
from limpet.converter.deepseek_layouts import hf_deepseek
from limpet.converter.errors import ConversionError
from limpet.converter.layouts import HF_LLAMA, INTERNLM2
from limpet.converter.rope import context_limit, read_rope
from limpet.converter.rules import Layout
from limpet.converter.text_file import Count, Positive, as_record


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of config.json that matter here."""

    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    intermediate_size: Count
    vocab_size: Count
    max_position_embeddings: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    hidden_act: str = "silu"
    quantization_config: dict[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    bias: bool = True  # of InternLM2's attention
    sliding_window: Count | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 0
    layer_types: list[str] | None = None


class _Flags(TypedDict, total=False):
    """Fields of ModelConfig."""

    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool


def _qwen_window(config: _Config) -> int | None:
    """Some layers may have none, but the others' window bounds what is exact."""
    if not config.use_sliding_window:
        return None
    if config.layer_types is not None:
        return config.sliding_window if "sliding_attention" in config.layer_types else None
    return config.sliding_window if config.max_window_layers < config.num_hidden_layers else None


@dataclass(frozen=True)
class Architecture:
    """How one `architectures` entry differs from the others; `defaults` are its values of absent keys.

    `complete` makes a configuration with Llama's numbers, and config.json's keys, into the architecture's own.
    """

    layout: Callable[[ModelConfig], Layout] = lambda config: HF_LLAMA
    flags: Callable[[_Config], _Flags] = lambda config: {}
    window: Callable[[_Config], int | None] = lambda config: None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    complete: Callable[[Mapping[str, Any], ModelConfig], ModelConfig] = lambda keys, config: config


_ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(
        flags=lambda c: {"qkv_bias": c.attention_bias, "o_bias": c.attention_bias, "mlp_bias": c.mlp_bias},
        defaults={"max_position_embeddings": 2048},
    ),
    "MistralForCausalLM": Architecture(
        window=lambda c: c.sliding_window, defaults={"max_position_embeddings": 131072, "sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": Architecture(
        flags=lambda c: {"qkv_bias": True}, window=_qwen_window, defaults={"max_position_embeddings": 32768}
    ),
    "Qwen3ForCausalLM": Architecture(
        flags=lambda c: {"qkv_bias": c.attention_bias, "o_bias": c.attention_bias, "qk_norm": True},
        window=_qwen_window,
        defaults={"max_position_embeddings": 32768, "head_dim": 128},
    ),
    "InternLM2ForCausalLM": Architecture(
        layout=lambda config: INTERNLM2,
        flags=lambda c: {"qkv_bias": c.bias, "o_bias": c.bias},
        defaults={"max_position_embeddings": 2048},
    ),
    "DeepseekV2ForCausalLM": Architecture(
        layout=hf_deepseek, defaults={"max_position_embeddings": 2048}, complete=complete_deepseek
    ),
}
# Keys whose null says something else than their absence.
_NULL_COUNTS = frozenset({"sliding_window"})


def find_architecture(raw: Mapping[str, Any]) -> tuple[str, Architecture]:
    """Name and description of the checkpoint's architecture; raises ConversionError for an unknown one."""
    names = as_record(raw.get("architectures") or [], list[str], "config.json")
    for name in names:
        if name in _ARCHITECTURES:
            return name, _ARCHITECTURES[name]
    found = ", ".join(names) or "none"
    raise ConversionError(f"Architecture {found} is not supported; known are {', '.join(sorted(_ARCHITECTURES))}.")


def read_model_config(raw: Mapping[str, Any], dtype: DType) -> ModelConfig:
    """The numbers of config.json; raises ConversionError for a key that is missing, malformed or not supported."""
    name, architecture = find_architecture(raw)
    stated = {key: value for key, value in raw.items() if value is not None or key in _NULL_COUNTS}
    keys = {**architecture.defaults, **stated}
    config = as_record(keys, _Config, "config.json")
    _refuse_unsupported(config)
    theta, scaling = read_rope(keys)
    model = ModelConfig(
        architecture="llama",
        source_architecture=name,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=context_limit(config.max_position_embeddings, scaling),
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=config.tie_word_embeddings,
        sliding_window=architecture.window(config),
        dtype=dtype,
        bos_token_id=config.bos_token_id,
        **architecture.flags(config),
    )
    return architecture.complete(keys, model)


def _refuse_unsupported(config: _Config) -> None:
    if config.quantization_config:
        method = config.quantization_config.get("quant_method", "unknown")
        raise ConversionError(f"The checkpoint is quantised ({method}): convert the unquantised one, or a GGUF file.")
    if config.hidden_act not in ("silu", "swish"):
        raise ConversionError(f"config.json says hidden_act is {config.hidden_act!r}; only silu is supported.")
