"""The rows' state between steps: block tables, last sampled ids and sampling settings, allocated once.

Rows are stable: a sequence keeps its row while it runs. Each step writes only what changed (`apply`), then `inputs`
lays out the step's tokens: decodes (one token each) first, then prefill chunks. One row more than sequences can have
belongs to nobody: it pads a captured CUDA graph's step, and all its positions stand in the scratch block.
"""

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from limpet.backend.attention_metadata import AttentionMetadata
from limpet.backend.core import StepPlan
from limpet.backend.logit_rules import LogitRules
from limpet.backend.logprobs import LogprobRows
from limpet.backend.ranks.group import RankGroup
from limpet.backend.sampler import SamplingRows
from limpet.backend.staging import ALIGNMENT, Array, send

Ints: TypeAlias = npt.NDArray[np.int64]

UNKNOWN_ID = -1  # stands for the id that the row sampled last
BYTES_PER_TOKEN = 80  # of the tensors of StepInputs, when every token is a sequence that is sampled
MAX_PADDING = 16 * ALIGNMENT  # between them


class StepShape(NamedTuple):
    """What a captured step holds at most: tokens, sequences that decode (or are sampled), and prefills."""

    num_tokens: int
    num_decodes: int
    num_prefills: int


@dataclass(frozen=True)
class StepInputs:
    """A step's tokens, and the tokens whose logits are sampled."""

    ids: Tensor  # [num_tokens], UNKNOWN_ID only among the decodes
    positions: Tensor  # [num_tokens]
    slots: Tensor  # [num_tokens] block * block_size + offset
    rows: Tensor  # [num_seqs]
    kv_lens: Tensor  # [num_seqs] int32
    cu_q_lens: Tensor  # [num_prefills + 1] int32, among the prefills' tokens
    chunk_starts: Tensor  # [num_prefills + 1] int32, among all tokens
    sampled_tokens: Tensor  # [num_sampled]
    sampled_rows: Tensor  # [num_sampled] in the order of the plan's work
    sampled_positions: Tensor  # [num_sampled] where the new ids will stand
    num_decodes: int
    max_q_len: int
    prefill_context_lens: list[int] | None
    sampled_host_rows: list[int]
    sampled_host_positions: list[int]
    samples_all: bool  # every token's logits are sampled


class InputBatch:
    """State of `num_rows` rows, each of at most `max_blocks` blocks of `block_size` tokens.

    `max_graph_tokens`: of the largest step that a CUDA graph will be captured for, 0 on the CPU.
    """

    def __init__(
        self,
        num_rows: int,
        max_blocks: int,
        block_size: int,
        *,
        scratch_block: int,
        max_graph_tokens: int,
        vocab_size: int,
        device: torch.device,
        ranks: RankGroup,
    ) -> None:
        self.device = device
        self.sampling = SamplingRows(num_rows, device)
        self.rules = LogitRules(num_rows, vocab_size, device)
        self.logprobs = LogprobRows()
        self.last_ids = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self._ranks = ranks
        self._block_size = block_size
        self._padding_row = num_rows
        self._host_tables = np.zeros((num_rows + 1, max_blocks), dtype=np.int32)
        self._host_tables[self._padding_row] = scratch_block
        self._block_tables = torch.from_numpy(self._host_tables).to(device)  # on the CPU the same memory
        self._num_blocks = [0] * num_rows
        num_bytes = BYTES_PER_TOKEN * max_graph_tokens + MAX_PADDING
        self._graph_inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Take over the plan's changes of owners and block tables."""
        for start in plan.starts:
            self._num_blocks[start.row] = 0
        changes = [(start.row, start.blocks) for start in plan.starts]
        changes += [(work.row, work.new_blocks) for work in plan.work if work.new_blocks]
        if changes:
            self._append_blocks(changes)
        if plan.starts:
            self.sampling.start(plan.starts)
            self.rules.start(plan.starts)
            self.logprobs.start(plan.starts)

    def inputs(self, plan: StepPlan, shape: StepShape | None = None) -> StepInputs:
        """The step's tokens; `plan.work` has its one-token items first.

        With `shape`: padded to it, always at the same addresses, for a captured step.
        """
        counts = _int64([work.num_tokens for work in plan.work])
        num_tokens, num_decodes = int(counts.sum()), int((counts == 1).sum())
        rows = _int64([work.row for work in plan.work])
        kv_lens = counts + _int64([work.start for work in plan.work])
        sampled = np.flatnonzero([work.samples for work in plan.work])
        full = shape or StepShape(num_tokens, num_decodes, len(counts) - num_decodes)
        cu_q_lens = np.concatenate(([0], np.cumsum(counts[num_decodes:]))).astype(np.int32)
        cu_q_lens = _padded(cu_q_lens, full.num_prefills + 1, int(cu_q_lens[-1]))
        sampled_tokens = np.cumsum(counts)[sampled] - 1
        arrays = [
            *self._token_arrays(plan, counts, kv_lens, rows, full.num_tokens),
            _padded_sequences(rows, num_decodes, full, self._padding_row),
            _padded_sequences(kv_lens.astype(np.int32), num_decodes, full, 1),
            cu_q_lens,
            cu_q_lens + np.int32(num_decodes),
            _padded(sampled_tokens, full.num_decodes, 0) if shape else sampled_tokens,
            rows[sampled],
            kv_lens[sampled],
        ]
        sent = send(arrays, self.device, self._graph_inputs if shape else None)
        return StepInputs(
            ids=sent[0],
            positions=sent[1],
            slots=sent[2],
            rows=sent[3],
            kv_lens=sent[4],
            cu_q_lens=sent[5],
            chunk_starts=sent[6],
            sampled_tokens=sent[7],
            sampled_rows=sent[8],
            sampled_positions=sent[9],
            num_decodes=full.num_decodes,
            max_q_len=_max_q_len(counts[num_decodes:], shape),
            prefill_context_lens=None if shape else [work.start for work in plan.work[num_decodes:]],
            sampled_host_rows=rows[sampled].tolist(),
            sampled_host_positions=kv_lens[sampled].tolist(),
            samples_all=not shape and len(sampled) == num_tokens,
        )

    def _token_arrays(self, plan: StepPlan, counts: Ints, kv_lens: Ints, rows: Ints, size: int) -> list[Array]:
        """Ids, positions and slots of the step's tokens, padded to `size`."""
        num_tokens = int(counts.sum())
        ids = chain.from_iterable(work.ids if work.ids is not None else (UNKNOWN_ID,) for work in plan.work)
        positions = np.arange(num_tokens) + np.repeat(kv_lens - np.cumsum(counts), counts)
        blocks = self._host_tables[np.repeat(rows, counts), positions // self._block_size].astype(np.int64)
        scratch_slot = int(self._host_tables[self._padding_row, 0]) * self._block_size
        return [
            _padded(np.fromiter(ids, np.int64, num_tokens), size, 0),
            _padded(positions, size, 0),
            _padded(blocks * self._block_size + positions % self._block_size, size, scratch_slot),
        ]

    def gather(self, inputs: StepInputs) -> tuple[Tensor, AttentionMetadata]:
        """Ids and attention metadata of the step, from the rows' state on the device.

        Where several ranks share the model rank 0 has sampled: all take its ids over.
        """
        if inputs.num_decodes:
            self._ranks.share(self.last_ids)
        decodes = inputs.ids[: inputs.num_decodes]
        last_ids = self.last_ids[inputs.rows[: inputs.num_decodes]]
        ids = torch.where(decodes == UNKNOWN_ID, last_ids, decodes)
        if inputs.max_q_len:
            ids = torch.cat((ids, inputs.ids[inputs.num_decodes :]))
        tables = self._block_tables[inputs.rows]
        return ids, AttentionMetadata(
            slots=inputs.slots,
            decode_block_tables=tables[: inputs.num_decodes],
            decode_kv_lens=inputs.kv_lens[: inputs.num_decodes],
            prefill_block_tables=tables[inputs.num_decodes :],
            prefill_kv_lens=inputs.kv_lens[inputs.num_decodes :],
            cu_q_lens=inputs.cu_q_lens,
            chunk_starts=inputs.chunk_starts,
            max_q_len=inputs.max_q_len,
            prefill_context_lens=inputs.prefill_context_lens,
        )

    def sample(self, inputs: StepInputs, logits: Tensor) -> Tensor:
        """Draw the sampled rows' ids [num_sampled] from logits [num_sampled, vocab] and remember them."""
        rules = self.rules.step(inputs.sampled_host_rows, inputs.sampled_host_positions)
        if rules is not None:
            logits = rules.apply(logits)
        ids = self.sampling.sample(logits, inputs.sampled_rows, inputs.sampled_host_rows, inputs.sampled_positions)
        if rules is not None:
            rules.count(ids)
        self.last_ids.index_copy_(0, inputs.sampled_rows, ids.clamp(min=0))
        return ids

    def _append_blocks(self, changes: list[tuple[int, list[int]]]) -> None:
        places = []
        for row, blocks in changes:
            first = self._num_blocks[row]
            self._host_tables[row, first : first + len(blocks)] = blocks
            self._num_blocks[row] = first + len(blocks)
            places.append(row * self._host_tables.shape[1] + np.arange(first, first + len(blocks)))
        if self.device.type == "cuda":
            index = np.concatenate(places)
            places_, values = send([index, self._host_tables.ravel()[index]], self.device)
            self._block_tables.view(-1).index_copy_(0, places_, values)


def _int64(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _padded(array: Array, size: int, value: int) -> Array:
    """`array` with `value` behind it, up to `size` elements."""
    missing = size - len(array)
    return np.concatenate((array, np.full(missing, value, dtype=array.dtype))) if missing > 0 else array


def _padded_sequences(array: Array, num_decodes: int, shape: StepShape, value: int) -> Array:
    """One element a sequence: the decodes' padded, then the prefills' padded."""
    decodes, prefills = array[:num_decodes], array[num_decodes:]
    return np.concatenate((_padded(decodes, shape.num_decodes, value), _padded(prefills, shape.num_prefills, value)))


def _max_q_len(counts: Ints, shape: StepShape | None) -> int:
    if shape is not None:
        return shape.num_tokens if shape.num_prefills else 0
    return int(counts.max(initial=0))
