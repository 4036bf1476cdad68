"""The rows' sampling settings, and the next id of every row: drawn by `sample` of `limpet.kernels`."""

import torch
from torch import Tensor

from limpet.backend.layers.device_kernels import kernels_for
from limpet.backend.sampling_params import SamplingParams


class SamplingRows:
    """Sampling settings of every row, on the device; `set_row` when a row changes its owner."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.temperature = torch.zeros(num_rows, device=device)  # 0: argmax
        self.top_k = torch.zeros(num_rows, dtype=torch.int64, device=device)  # 0: off
        self.top_p = torch.ones(num_rows, device=device)
        self.min_p = torch.zeros(num_rows, device=device)
        self.seed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.greedy = [True] * num_rows  # on the host: decides which work there is
        self.filtered = [False] * num_rows

    def set_row(self, row: int, params: SamplingParams) -> None:
        self.greedy[row] = params.is_greedy
        self.filtered[row] = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self.temperature[row] = 0 if params.is_greedy else params.temperature
        self.top_k[row] = min(params.top_k, 2**31)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = params.seed if params.seed < 2**63 else params.seed - 2**64


def sample(logits: Tensor, rows: list[int], positions: Tensor, settings: SamplingRows) -> Tensor:
    """ids [num_rows] for logits [num_rows, vocab]; INVALID_ID (-1) where a row's logits are not finite.

    `rows[i]` is the slot of logits[i]; positions [num_rows] is where the drawn ids will stand in their sequences.
    """
    drawn = [row for row in rows if not settings.greedy[row]]
    return kernels_for(logits.device).sample(
        logits,
        torch.tensor(rows, device=logits.device),
        positions,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.min_p,
        settings.seed,
        draws=bool(drawn),
        filters=any(settings.filtered[row] for row in drawn),
    )
