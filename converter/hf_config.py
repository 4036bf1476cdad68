"""Architecture numbers from a Hugging Face config.json."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from limpet.backend.checkpoint import DType, ModelConfig
from limpet.converter.errors import ConversionError
from limpet.converter.layouts import HF_LLAMA, INTERNLM2
from limpet.converter.rope import context_limit, read_rope
from limpet.converter.rules import Layout


class _Flags(TypedDict, total=False):
    """Fields of ModelConfig."""

    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool


@dataclass(frozen=True)
class Architecture:
    """How one `architectures` entry differs from Llama: its layout, the flags and the defaults of absent keys."""

    layout: Layout
    flags: Callable[[Mapping[str, Any]], _Flags]
    defaults: Mapping[str, Any]
    window: Callable[[Mapping[str, Any]], int | None]


def _llama_flags(config: Mapping[str, Any]) -> _Flags:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bool(config.get("mlp_bias", False))}


def _internlm2_flags(config: Mapping[str, Any]) -> _Flags:
    bias = bool(config.get("bias", True))
    return {"qkv_bias": bias, "o_bias": bias}


def _qwen3_flags(config: Mapping[str, Any]) -> _Flags:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": True}


def _no_window(config: Mapping[str, Any]) -> int | None:
    return None


def _mistral_window(config: Mapping[str, Any]) -> int | None:
    return config.get("sliding_window")


def _qwen_window(config: Mapping[str, Any]) -> int | None:
    """Some layers may have none, but the shortest one bounds what is exact."""
    if not config.get("use_sliding_window", False):
        return None
    if int(config.get("max_window_layers", 0)) >= int(config["num_hidden_layers"]) and not config.get("layer_types"):
        return None
    layer_types = config.get("layer_types")
    return None if layer_types and "sliding_attention" not in layer_types else config.get("sliding_window")


_ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(HF_LLAMA, _llama_flags, {"max_position_embeddings": 2048}, _no_window),
    "MistralForCausalLM": Architecture(
        HF_LLAMA, lambda _: {}, {"max_position_embeddings": 131072, "sliding_window": 4096}, _mistral_window
    ),
    "Qwen2ForCausalLM": Architecture(
        HF_LLAMA, lambda _: {"qkv_bias": True}, {"max_position_embeddings": 32768}, _qwen_window
    ),
    "Qwen3ForCausalLM": Architecture(
        HF_LLAMA, _qwen3_flags, {"max_position_embeddings": 32768, "head_dim": 128}, _qwen_window
    ),
    "InternLM2ForCausalLM": Architecture(INTERNLM2, _internlm2_flags, {"max_position_embeddings": 2048}, _no_window),
}


def find_architecture(config: Mapping[str, Any]) -> tuple[str, Architecture]:
    """Name and description of the checkpoint's architecture; raises ConversionError for an unknown one."""
    names = config.get("architectures") or []
    for name in names:
        if name in _ARCHITECTURES:
            return name, _ARCHITECTURES[name]
    found = ", ".join(map(str, names)) or "none"
    raise ConversionError(f"Architecture {found} is not supported; known are {', '.join(sorted(_ARCHITECTURES))}.")


def read_model_config(raw: Mapping[str, Any], dtype: DType) -> ModelConfig:
    """The numbers of config.json; raises ConversionError for a key that is missing, malformed or not supported."""
    name, architecture = find_architecture(raw)
    config = {
        **architecture.defaults,
        **{key: value for key, value in raw.items() if value is not None or key in _NULL},
    }
    _refuse_unsupported(config)
    hidden_size, num_heads = _int(config, "hidden_size"), _int(config, "num_attention_heads")
    theta, scaling = read_rope(config)
    return ModelConfig(
        architecture="llama",
        source_architecture=name,
        hidden_size=hidden_size,
        num_layers=_int(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_int(config, "num_key_value_heads", num_heads),
        head_dim=_int(config, "head_dim", hidden_size // num_heads),
        intermediate_size=_int(config, "intermediate_size"),
        vocab_size=_int(config, "vocab_size"),
        max_position_embeddings=context_limit(_int(config, "max_position_embeddings"), scaling),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        sliding_window=architecture.window(config),
        dtype=dtype,
        bos_token_id=config.get("bos_token_id"),
        **architecture.flags(config),
    )


# Keys whose null says something else than their absence.
_NULL = frozenset({"sliding_window"})


def _int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConversionError(f"config.json says {key} is {value!r}; a positive integer is needed.")
    return value


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ConversionError(f"The checkpoint is quantised ({method}): convert the unquantised one, or a GGUF file.")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConversionError(f"config.json says hidden_act is {activation!r}; only silu is supported.")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads > 0 and heads % kv_heads:
        raise ConversionError(f"config.json has {heads} attention heads, no multiple of its {kv_heads} K/V heads.")
