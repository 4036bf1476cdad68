"""Rotary position embedding: the angle table of each scaling kind.

Frequencies f_i = theta^(-2i/d). linear: f / factor. dynamic (NTK): theta grows once the context passes the original
length. llama3: low frequencies divided by factor, a smooth ramp between the two wavelengths. yarn (Peng et al. 2023,
section 3.2-3.4): interpolation below beta_slow rotations, extrapolation above beta_fast, a linear ramp between, and
cos/sin multiplied by the attention factor; with `mscale_all_dim` a second factor belongs on the scores, softmax_factor.
"""

import math

import torch
from torch import Tensor

from limpet.backend.checkpoint import CheckpointError, ModelConfig, RopeScaling
from limpet.backend.layers.device_kernels import kernels_for


class Rotary:
    """cos/sin table [max_positions, rotary_dim / 2] in float32, and its application.

    `session_len` positions are tabulated. The dynamic kind is tabulated for the context length `session_len`.
    """

    def __init__(self, config: ModelConfig, session_len: int, device: torch.device) -> None:
        frequencies = _frequencies(config, session_len)
        factor = _attention_factor(config.rope_scaling)
        positions = torch.arange(session_len, dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        self._cos = (angles.cos() * factor).to(device)
        self._sin = (angles.sin() * factor).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [num_tokens, rotary_dim / 2] of positions [num_tokens]."""
        return self._cos[positions], self._sin[positions]


def rotate(heads: Tensor, angles: tuple[Tensor, Tensor]) -> None:
    """Rotate heads [num_tokens, num_heads, head_dim] in place."""
    kernels_for(heads.device).apply_rotary(heads, *angles)


def _frequencies(config: ModelConfig, session_len: int) -> Tensor:
    dim, theta, scaling = config.rotary_dim, config.rope_theta, config.rope_scaling
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    if scaling is None:
        return 1.0 / theta**exponents
    if scaling.rope_type == "linear":
        return 1.0 / theta**exponents / scaling.factor
    if scaling.rope_type == "dynamic":
        original = config.max_position_embeddings
        length = max(session_len, original)
        grown: float = theta * (scaling.factor * length / original - (scaling.factor - 1)) ** (dim / (dim - 2))
        return 1.0 / grown**exponents
    if scaling.rope_type == "llama3":
        return _llama3(1.0 / theta**exponents, scaling)
    return _yarn(1.0 / theta**exponents, config, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
    if low is None or high is None or original is None:
        raise CheckpointError("model.json lacks fields of llama3 rope scaling: convert the model again.")
    wavelengths = 2 * math.pi / frequencies
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return frequencies * smooth + frequencies / scaling.factor * (1 - smooth)


def _yarn(frequencies: Tensor, config: ModelConfig, scaling: RopeScaling) -> Tensor:
    dim = config.rotary_dim
    original = scaling.original_max_position_embeddings or config.max_position_embeddings

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def softmax_factor(scaling: RopeScaling | None) -> float:
    """What YaRN multiplies attention scores by where the configuration states `mscale_all_dim`, as DeepSeek's does."""
    if scaling is None or not scaling.mscale_all_dim:
        return 1.0
    return _yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2


def _attention_factor(scaling: RopeScaling | None) -> float:
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _yarn_mscale(scaling.factor, scaling.mscale) / _yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return _yarn_mscale(scaling.factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
