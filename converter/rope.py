"""Rotary scaling as Hugging Face's config.json states it, in any of its spellings."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from limpet.backend.checkpoint import RopeScaling
from limpet.converter.errors import ConversionError
from limpet.converter.text_file import Count, Positive, as_record

_SUPPORTED = ("linear", "dynamic", "llama3", "yarn")


class RopeParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of `rope_parameters` (transformers 5) and of `rope_scaling` (earlier releases)."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: float | None = None
    factor: Positive | None = None
    original_max_position_embeddings: Count | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None


class _RopeKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of config.json itself."""

    max_position_embeddings: Count
    rope_theta: Positive | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: Count | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None


def read_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling; raises ConversionError for a kind that is not supported, never ignores one."""
    keys = as_record(config, _RopeKeys, "config.json")
    stated = {**(keys.rope_scaling or {}), **(keys.rope_parameters or {})}
    if any(isinstance(value, Mapping) for value in stated.values()):
        raise ConversionError("config.json has rotary parameters per kind of layer: not supported.")
    parameters = as_record(stated, RopeParameters, "config.json")
    if (parameters.partial_rotary_factor or keys.partial_rotary_factor or 1.0) != 1.0:
        raise ConversionError("config.json has partial_rotary_factor other than 1: not supported.")
    theta = parameters.rope_theta or keys.rope_theta or 10000.0
    kind = parameters.rope_type or parameters.type or "default"
    if kind == "default":
        return theta, None
    if kind not in _SUPPORTED:
        raise ConversionError(f"Rope scaling {kind!r} is not supported; known are {', '.join(_SUPPORTED)}.")
    return theta, _scaling(kind, parameters, keys)


def _scaling(kind: str, parameters: RopeParameters, keys: _RopeKeys) -> RopeScaling:
    required = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    for name in required:
        if getattr(parameters, name) is None:
            raise ConversionError(f"Rope scaling {kind!r} lacks the number {name}.")
    # Of the two places the one beside the dictionary wins, as in transformers.
    original = keys.original_max_position_embeddings or parameters.original_max_position_embeddings
    stated = {name: value for name, value in msgspec.structs.asdict(parameters).items() if value is not None}
    stated |= {"rope_type": kind, "original_max_position_embeddings": original or keys.max_position_embeddings}
    return as_record(stated, RopeScaling, "config.json")


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
