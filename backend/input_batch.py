"""The rows' state between steps: block tables, last sampled ids and sampling settings, allocated once.

Rows are stable: a sequence keeps its row while it runs. Each step writes only what changed (`apply`), then `inputs`
lays out the step's tokens: decodes (one token each) first, then prefill chunks.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from limpet.backend.attention_metadata import AttentionMetadata
from limpet.backend.core import RowWork, StepPlan
from limpet.backend.sampler import SamplingRows


@dataclass(frozen=True)
class StepInputs:
    """What one forward pass and its sampling read."""

    ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    attention: AttentionMetadata
    sampled_tokens: Tensor  # [num_sampled] index into the step's tokens
    sampled_rows: list[int]  # in the order of the plan's work
    sampled_positions: Tensor  # [num_sampled] where the new ids will stand


class InputBatch:
    """State of `num_rows` rows, each of at most `max_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self.device = device
        self.block_size = block_size
        self.sampling = SamplingRows(num_rows, device)
        self.last_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._block_tables = np.zeros((num_rows, max_blocks), dtype=np.int64)
        self._num_blocks = [0] * num_rows

    def apply(self, plan: StepPlan) -> None:
        """Take over the plan's changes of owners and block tables."""
        for start in plan.starts:
            self._num_blocks[start.row] = 0
            self._append_blocks(start.row, start.blocks)
            self.sampling.set_row(start.row, start.params)
        for work in plan.work:
            self._append_blocks(work.row, work.new_blocks)

    def inputs(self, plan: StepPlan) -> StepInputs:
        """The step's tokens; `plan.work` has its one-token items first."""
        decodes = [work for work in plan.work if work.num_tokens == 1]
        prefills = plan.work[len(decodes) :]
        rows = np.repeat([work.row for work in plan.work], [work.num_tokens for work in plan.work])
        positions = np.concatenate([np.arange(work.start, work.start + work.num_tokens) for work in plan.work])
        blocks = self._block_tables[rows, positions // self.block_size]
        ends = np.cumsum([work.num_tokens for work in plan.work])
        sampled = [index for index, work in enumerate(plan.work) if work.samples]
        return StepInputs(
            ids=self._ids(plan.work),
            positions=self._tensor(positions),
            attention=AttentionMetadata(
                slots=self._tensor(blocks * self.block_size + positions % self.block_size),
                decode_block_tables=self._tables(decodes),
                decode_kv_lens=self._int32([work.start + 1 for work in decodes]),
                prefill_block_tables=self._tables(prefills),
                prefill_kv_lens=self._int32([work.start + work.num_tokens for work in prefills]),
                cu_q_lens=self._int32(list(accumulate((work.num_tokens for work in prefills), initial=0))),
                max_q_len=max((work.num_tokens for work in prefills), default=0),
            ),
            sampled_tokens=self._tensor(ends[sampled] - 1),
            sampled_rows=[plan.work[index].row for index in sampled],
            sampled_positions=self._tensor(positions[ends[sampled] - 1] + 1),
        )

    def _append_blocks(self, row: int, blocks: list[int]) -> None:
        count = self._num_blocks[row]
        self._block_tables[row, count : count + len(blocks)] = blocks
        self._num_blocks[row] = count + len(blocks)

    def _ids(self, work: list[RowWork]) -> Tensor:
        known = [item.ids if item.ids is not None else [0] for item in work]
        ids = torch.from_numpy(np.concatenate(known).astype(np.int64)).to(self.device)
        unknown = [index for index, item in enumerate(work) if item.ids is None]  # decodes: one token each, first
        if unknown:
            ids[unknown] = self.last_ids[[work[index].row for index in unknown]]
        return ids

    def _tables(self, work: list[RowWork]) -> Tensor:
        rows = [item.row for item in work]
        longest = max((self._num_blocks[row] for row in rows), default=0)
        tables = self._block_tables[rows, :longest] if rows else np.zeros((0, 0), dtype=np.int64)
        return torch.from_numpy(tables.astype(np.int32)).to(self.device)

    def _int32(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _tensor(self, array: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
