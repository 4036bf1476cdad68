"""Rotary scaling as Hugging Face's config.json states it, in any of its spellings."""

from collections.abc import Mapping
from typing import Any

from limpet.backend.checkpoint import RopeScaling
from limpet.converter.errors import ConversionError

_SUPPORTED = ("linear", "dynamic", "llama3", "yarn")
_NUMBERS = (
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


def read_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling; raises ConversionError for a kind that is not supported, never ignores one."""
    # transformers 5 writes `rope_parameters`, earlier releases `rope_theta` and `rope_scaling`.
    parameters: Mapping[str, Any] = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(parameters.get("rope_theta", config.get("rope_theta") or 10000.0))
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ConversionError("config.json has rotary parameters per kind of layer: not supported.")
    if float(parameters.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)) != 1.0:
        raise ConversionError("config.json has partial_rotary_factor other than 1: not supported.")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind not in _SUPPORTED:
        raise ConversionError(f"Rope scaling {kind!r} is not supported; known are {', '.join(_SUPPORTED)}.")
    return theta, _scaling(kind, parameters, config)


def _scaling(kind: Any, parameters: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling:
    required = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    for key in required:
        if not isinstance(parameters.get(key), int | float):
            raise ConversionError(f"Rope scaling {kind!r} lacks the number {key}.")
    given = {key: float(parameters[key]) for key in _NUMBERS if parameters.get(key) is not None}
    # Of the two places the one beside the dictionary wins, as in transformers.
    original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    return RopeScaling(
        rope_type=kind,
        factor=float(parameters["factor"]),
        original_max_position_embeddings=int(original or config["max_position_embeddings"]),
        truncate=bool(parameters.get("truncate", True)),
        **given,
    )
