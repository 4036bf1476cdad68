"""Runs the planned steps on the device: block copies, forward pass, sampling.

`forward` and `sample` only queue work, so that the engine plans the next step, and talks to its front ends, while this
one runs.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.backend.checkpoint import ModelConfig
from limpet.backend.core import RowStart, RowWork, SampledStep, StepPlan
from limpet.backend.device_queue import device_queue
from limpet.backend.host_cache import HostCache
from limpet.backend.input_batch import InputBatch, StepInputs
from limpet.backend.logprobs import PromptPart, prompt_table, read_sampled, sampled_table
from limpet.backend.models.causal_lm import CausalLM
from limpet.backend.sampling_params import SamplingParams
from limpet.backend.step_graphs import Ladders, StepGraphs, ladders
from limpet.backend.token_masks import TokenMasks

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Forwarded:
    """What a forward pass leaves on the device."""

    inputs: StepInputs
    logits: Tensor  # [num_sampled, vocab]
    prompt_tables: list[tuple[PromptPart, Tensor]]  # of prompts whose logprobs are asked for
    sampled_logprobs: dict[int, int]  # index among the sampled -> how many of the likeliest ids are reported


@dataclass(frozen=True)
class ForwardHandle:
    """A queued forward pass."""

    result: "Future[Forwarded]"


class Runner:
    """One model with its cache and the state of `num_rows` rows of at most `session_len` tokens.

    It computes nothing before `allocate`.
    """

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        *,
        block_size: int,
        num_rows: int,
        session_len: int,
        max_prefill_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        host_cache_bytes: int = 0,
    ) -> None:
        self._model = model
        self._config = config
        self._block_size = block_size
        self._num_rows = num_rows
        self._max_blocks = -(-session_len // block_size)
        self._max_prefill_tokens = max_prefill_tokens
        self._device = device
        self._dtype = dtype
        self.num_host_blocks = host_cache_bytes // model.cache_layout.block_bytes(block_size, dtype)
        self._host_cache: HostCache | None = None
        self._queue = device_queue(device)
        self._graphs = StepGraphs(self._compute)
        self._ladders = Ladders([], [])
        if device.type == "cuda":
            self._ladders = ladders(num_rows, max_prefill_tokens, captures_prefills=model.captures_prefills)

    def allocate(self, num_blocks: int) -> None:
        """Make a cache of `num_blocks` blocks, and one block more, into which the rows that pad a graph write.

        Raises ConfigError if the host has no memory for its tier.
        """
        shape = self._model.cache_layout.shape(num_blocks + 1, self._block_size)
        self.cache = torch.empty(shape, dtype=self._dtype, device=self._device)  # nobody reads an unwritten slot
        self._layer_caches = [tuple(layer) for layer in self.cache]
        if num_blocks and self.num_host_blocks:
            self._host_cache = HostCache(self.cache, self.num_host_blocks)
        self._batch = InputBatch(
            self._num_rows,
            self._max_blocks,
            self._block_size,
            scratch_block=num_blocks,
            max_graph_tokens=max((shape.num_tokens for ladder in self._ladders for shape in ladder), default=0),
            vocab_size=self._config.vocab_size,
            device=self._device,
            ranks=self._model.ranks,
        )

    @torch.inference_mode()
    def measure(self) -> int:
        """Bytes of device memory that the largest step takes, by running it (CUDA only).

        All rows are at work, on so many prompt tokens, and sampled with all filters and penalties. The steps after it
        compile what the first one did not need: kernels for short prompts, and sampling without filters.
        """
        self.allocate(0)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        filtered = SamplingParams(temperature=1.0, top_k=2, top_p=0.9, repetition_penalty=1.1)
        for num_tokens, params in ((self._max_prefill_tokens, filtered), (2, SamplingParams()), (2, GREEDY)):
            forwarded = self._forward(self._full_plan(num_tokens, params))
            if self._model.ranks.rank == 0:
                self._ids(forwarded)
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - before
        del self.cache, self._layer_caches, self._batch
        torch.cuda.empty_cache()
        return peak

    @torch.inference_mode()
    def capture(self) -> Ladders:
        """Capture CUDA graphs; the shapes of the steps that they hold, none on the CPU."""
        if self._ladders.decodes:
            self._graphs.capture(self._ladders, lambda shape: self._batch.inputs(StepPlan([], [], []), shape))
        return self._ladders

    @property
    def is_on_cuda(self) -> bool:
        return self._device.type == "cuda"

    @property
    def graph_bytes(self) -> int:
        """Device memory of the captured graphs."""
        return self._graphs.num_bytes

    def forward(self, plan: StepPlan) -> ForwardHandle:
        return ForwardHandle(self._queue.run(lambda: self._forward(plan)))

    def sample(
        self, handle: ForwardHandle, masks: TokenMasks | None = None, on_ready: Callable[[], None] | None = None
    ) -> "Future[SampledStep]":
        """The ids of the plan's sampling rows, in the plan's order; `on_ready` is called when they are there."""
        sampled = self._queue.read(
            lambda: self._sample(handle.result.result(), masks), lambda read: _unpack(handle, read)
        )
        if on_ready is not None:
            sampled.add_done_callback(lambda _: on_ready())
        return sampled

    def close(self) -> None:
        self._queue.close()
        if self._host_cache is not None:
            self._host_cache.close()
        self._graphs = StepGraphs(self._compute)  # graphs go before the collectives that were captured in them

    @torch.inference_mode()
    def _forward(self, plan: StepPlan) -> Forwarded:
        self._move_blocks(plan)
        self._batch.apply(plan)
        parts = self._batch.logprobs.prompt_parts(plan)
        num_prefills = sum(work.num_tokens > 1 for work in plan.work)
        shape = self._graphs.shape_for(plan.num_tokens, len(plan.work) - num_prefills, num_prefills)
        inputs = self._batch.inputs(plan, None if parts else shape)
        tables: list[tuple[PromptPart, Tensor]] = []
        if shape is not None and not parts:
            logits = self._graphs.replay(shape)[: len(inputs.sampled_host_rows)]
        else:
            hidden = self._hidden(inputs)
            tables = [(part, prompt_table(self._model.logits, hidden, part)) for part in parts]
            logits = self._logits(inputs, hidden)
        return Forwarded(inputs, logits, tables, self._batch.logprobs.sampled(inputs.sampled_host_rows))

    def _move_blocks(self, plan: StepPlan) -> None:
        host = self._host_cache
        if host is not None:
            host.offload(plan.offloads)
            host.await_copies(block for copy in plan.copies for block in copy)
        for source, destination in plan.copies:
            self.cache[:, :, destination] = self.cache[:, :, source]
        if host is not None:
            host.load(plan.loads)
            host.await_copies(block for start in plan.starts for block in start.blocks)
            host.await_copies(block for work in plan.work for block in work.new_blocks)

    def _compute(self, inputs: StepInputs) -> Tensor:
        """The logits of the sampled tokens."""
        return self._logits(inputs, self._hidden(inputs))

    def _hidden(self, inputs: StepInputs) -> Tensor:
        ids, attention = self._batch.gather(inputs)
        hidden: Tensor = self._model(ids, inputs.positions, self._layer_caches, attention)
        return hidden

    def _logits(self, inputs: StepInputs, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden if inputs.samples_all else hidden[inputs.sampled_tokens])

    @torch.inference_mode()
    def _sample(self, forwarded: Forwarded, masks: TokenMasks | None) -> list[Tensor]:
        """Ids, then the tables of logprobs, that of the sampled ids first."""
        ids, wanted = self._ids(forwarded, masks), forwarded.sampled_logprobs
        sampled = [sampled_table(forwarded.logits, ids, wanted)] if wanted else []
        return [ids, *sampled, *(table for _, table in forwarded.prompt_tables)]

    def _ids(self, forwarded: Forwarded, masks: TokenMasks | None = None) -> Tensor:
        if not forwarded.inputs.sampled_host_rows:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        logits = forwarded.logits if masks is None else masks.apply(forwarded.logits)
        return self._batch.sample(forwarded.inputs, logits)

    def _full_plan(self, num_prefill_tokens: int, params: SamplingParams) -> StepPlan:
        """Prompts of so many tokens, then decodes in the rows that are left, all in block 0."""
        session_len = self._max_blocks * self._block_size
        num_full, rest = divmod(min(num_prefill_tokens, self._num_rows * session_len), session_len)
        lengths = [session_len] * num_full + ([rest] if rest else [])
        counts = [1] * (self._num_rows - len(lengths)) + sorted(lengths)
        starts = [RowStart(row, params, [0] * self._max_blocks) for row in range(self._num_rows)]
        work = [RowWork(row, 0, count, [0] * count, [], True) for row, count in enumerate(counts)]
        return StepPlan([], starts, work)


def _unpack(handle: ForwardHandle, read: list[Tensor]) -> SampledStep:
    forwarded = handle.result.result()
    ids, *tables = read
    wanted = forwarded.sampled_logprobs
    logprobs = read_sampled(tables.pop(0), wanted) if wanted else {}
    parts = [part for part, _ in forwarded.prompt_tables]
    prompts = [(part.work, part.first_position, part.read(table)) for part, table in zip(parts, tables, strict=True)]
    return SampledStep(ids.tolist(), logprobs, prompts)
