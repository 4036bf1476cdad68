"""Rotary scaling as Hugging Face's config.json states it, in any of its spellings."""

import math
from collections.abc import Mapping
from typing import Any

import torch

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


def context_limit(max_position_embeddings: int, scaling: RopeScaling | None) -> int:
    """The longest context that the scaling is meant for, by vLLM's rule: linear and YaRN multiply the original one.

    The dynamic kind changes every frequency once the original context is passed, so it ends there.
    """
    if scaling is None or scaling.rope_type not in ("linear", "yarn"):
        return max_position_embeddings
    original = scaling.original_max_position_embeddings if scaling.rope_type == "yarn" else None
    return int((original or max_position_embeddings) * scaling.factor)


def llama3_divisors(scaling: RopeScaling, theta: float, head_dim: int) -> torch.Tensor:
    """By what Llama 3's scaling divides each of the head_dim / 2 frequencies, as llama.cpp stores it."""
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
    assert low is not None
    assert high is not None
    assert original is not None
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / scaling.factor + smooth)).float()
