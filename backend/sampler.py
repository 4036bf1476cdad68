"""The rows' sampling settings, and the next id of every row: drawn by `sample` of `limpet.kernels`."""

import numpy as np
import torch
from torch import Tensor

from limpet.backend.core import RowStart
from limpet.backend.layers.device_kernels import kernels_for
from limpet.backend.staging import send


class SamplingRows:
    """Sampling settings of every row, on the device."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._device = device
        self.temperature = torch.zeros(num_rows, device=device)  # 0: argmax
        self.top_k = torch.zeros(num_rows, dtype=torch.int64, device=device)  # 0: off
        self.top_p = torch.ones(num_rows, device=device)
        self.min_p = torch.zeros(num_rows, device=device)
        self.seed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.greedy = [True] * num_rows  # on the host: decides which work there is
        self.filtered = [False] * num_rows

    def start(self, starts: list[RowStart]) -> None:
        """Rows change their owners."""
        each = [start.params for start in starts]
        for row, params in zip((start.row for start in starts), each, strict=True):
            self.greedy[row] = params.is_greedy
            self.filtered[row] = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        rows, *columns = send(
            [
                np.array([start.row for start in starts], dtype=np.int64),
                np.array([0 if params.is_greedy else params.temperature for params in each], dtype=np.float32),
                np.array([min(params.top_k, 2**31) for params in each], dtype=np.int64),
                np.array([params.top_p for params in each], dtype=np.float32),
                np.array([params.min_p for params in each], dtype=np.float32),
                np.array([params.seed for params in each], dtype=np.uint64).view(np.int64),
            ],
            self._device,
        )
        targets = (self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
        for target, column in zip(targets, columns, strict=True):
            target.index_copy_(0, rows, column)

    def sample(self, logits: Tensor, rows: Tensor, host_rows: list[int], positions: Tensor) -> Tensor:
        """ids [num_sampled] for logits [num_sampled, vocab]; INVALID_ID (-1) where a row's logits are not finite.

        `rows` (and `host_rows`, the same on the host) is the row of each; positions [num_sampled] is where the ids
        will stand in their sequences.
        """
        drawn = [row for row in host_rows if not self.greedy[row]]
        return kernels_for(logits.device).sample(
            logits,
            rows,
            positions,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seed,
            draws=bool(drawn),
            filters=any(self.filtered[row] for row in drawn),
        )
