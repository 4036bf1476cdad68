"""The next id of every row: argmax, or a seeded draw after temperature, top-k, top-p and min-p, in that order.

A draw is argmax(logits / temperature + g) with Gumbel noise g (Gumbel-max trick: the same distribution as softmax). g
is a hash of (seed, position, id), so a request draws the same ids on any row, in any company and on any device.
"""

import torch
from torch import Tensor

from limpet.backend.sampling_params import SamplingParams

INVALID_ID = -1  # a row whose logits are not finite

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: step of splitmix64 (Steele et al. 2014)
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


class SamplingRows:
    """Sampling settings of every row, on the device; `set_row` when a row changes its owner."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.temperature = torch.ones(num_rows, device=device)
        self.top_k = torch.zeros(num_rows, dtype=torch.int64, device=device)  # 0: off
        self.top_p = torch.ones(num_rows, device=device)
        self.min_p = torch.zeros(num_rows, device=device)
        self.seed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.greedy = [True] * num_rows  # on the host: decides which work there is
        self.filtered = [False] * num_rows

    def set_row(self, row: int, params: SamplingParams) -> None:
        self.greedy[row] = params.is_greedy
        self.filtered[row] = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self.temperature[row] = params.temperature
        self.top_k[row] = min(params.top_k, 2**31)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = params.seed if params.seed < 2**63 else params.seed - 2**64


def sample(logits: Tensor, rows: list[int], positions: Tensor, settings: SamplingRows) -> Tensor:
    """ids [num_rows] for float32 logits [num_rows, vocab]; INVALID_ID where a row's logits are not finite.

    `rows[i]` is the slot of logits[i]; positions [num_rows] is where the drawn ids will stand in their sequences.
    """
    best, ids = logits.max(dim=-1)
    drawn = [index for index, row in enumerate(rows) if not settings.greedy[row]]
    if drawn:
        ids[drawn] = _draw(logits[drawn], [rows[index] for index in drawn], positions[drawn], settings)
    return ids.masked_fill_(~torch.isfinite(best), INVALID_ID)


def _draw(logits: Tensor, rows: list[int], positions: Tensor, settings: SamplingRows) -> Tensor:
    scaled = logits / settings.temperature[rows].unsqueeze(1)
    filtered = [index for index, row in enumerate(rows) if settings.filtered[row]]
    if filtered:
        scaled[filtered] = _filter(scaled[filtered], [rows[index] for index in filtered], settings)
    return (scaled + gumbel_noise(settings.seed[rows], positions, logits.shape[1])).argmax(dim=-1)


def _filter(logits: Tensor, rows: list[int], settings: SamplingRows) -> Tensor:
    """Minus infinity for the ids that top-k, then top-p, then min-p exclude; the most likely id always stays."""
    vocab_size = logits.shape[1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    top_k = settings.top_k[rows].unsqueeze(1)
    ranks = torch.arange(vocab_size, device=logits.device)
    excluded = (ranks >= top_k) & (top_k > 0)
    probabilities = ordered.masked_fill(excluded, float("-inf")).softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    excluded |= mass_before >= settings.top_p[rows].unsqueeze(1)
    excluded |= probabilities < settings.min_p[rows].unsqueeze(1) * probabilities[:, :1]
    excluded[:, 0] = False
    return logits.masked_fill(torch.zeros_like(excluded).scatter_(1, order, excluded), float("-inf"))


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Noise [num_rows, vocab] keyed by (seed, position, id), each entry -log(-log(u)) for a uniform u of 23 bits."""
    keys = _mix(seeds + _mix(positions.to(torch.int64) * _GOLDEN + _GOLDEN))
    ids = torch.arange(vocab_size, dtype=torch.int64, device=seeds.device)
    bits = (
        _mix(keys.unsqueeze(1) + ids * _GOLDEN) & 0x7FFFFF
    )  # 23 bits: u + half a step stays exact in float32, so it is never 0 or 1
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finalizer; int64 products wrap as the unsigned ones do."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
