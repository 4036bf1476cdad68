"""Who computes what in the next step: slots, decode first, chunked prefill, preemption by recompute. No torch.

The scheduler runs one step ahead of what it knows: `schedule` plans a step while the ids of the one before are still
being sampled, so a sequence's length is known but maybe not its last id. A sequence that turns out to have ended is
dropped in `update`; what the step in flight computed for it is thrown away.

A sequence gets blocks for all its known tokens when it is admitted, so chunks of a prefill never wait for memory.
Decodes grow block by block; when none is left the most junior running sequence is preempted: its blocks are released
softly and it waits at its old place. Admission leaves one free block for each running sequence, so that a resumed
sequence gains at least a block of tokens before it can be preempted again.
"""

import bisect
import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass

from limpet.backend.cache_manager import BlockMoves, CacheManager
from limpet.backend.core import RequestError, RowStart, RowWork, SampledStep, Sequence, SequenceOutput, StepPlan


@dataclass
class ScheduledStep:
    """A plan and the sequence behind each of its work items."""

    plan: StepPlan
    sequences: list[Sequence]

    def put_decodes_first(self) -> None:
        order = sorted(range(len(self.sequences)), key=lambda index: self.plan.work[index].num_tokens > 1)
        self.sequences = [self.sequences[index] for index in order]
        self.plan.work = [self.plan.work[index] for index in order]

    def sampled(self) -> list[Sequence]:
        """The sequences that get an id, in the order of the sampled ids."""
        return [seq for seq, work in zip(self.sequences, self.plan.work, strict=True) if work.samples]


class Scheduler:
    """Slots, waiting line and cache blocks of one engine.

    `max_rows` slots; at most `max_prefill_tokens` prompt tokens a step; at most `max_waiting` sequences wait.
    """

    def __init__(self, cache: CacheManager, *, max_rows: int, max_prefill_tokens: int, max_waiting: int) -> None:
        self.cache = cache
        self.max_rows = max_rows
        self._max_prefill_tokens = max_prefill_tokens
        self._max_waiting = max_waiting
        self._free_rows = list(range(max_rows))  # heap
        self.running: list[Sequence] = []  # by seniority
        self.waiting: list[Sequence] = []  # by seniority
        self._num_arrived = 0
        self.num_preemptions = 0

    # ---- requests come and go

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; raises RequestError UNAVAILABLE when the queue is full."""
        if len(self.waiting) >= self._max_waiting:
            raise RequestError(
                "UNAVAILABLE", f"The queue is full ({self._max_waiting} requests wait): try again in a few seconds."
            )
        self._num_arrived += 1
        sequence.arrival = self._num_arrived
        bisect.insort(self.waiting, sequence, key=_seniority)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; what is cached of it is its `cached_prefix`."""
        sequence.finished = True
        if sequence.row is None:
            self.waiting.remove(sequence)
        else:
            self._stop_running(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def expired(self) -> list[Sequence]:
        """Sequences whose deadline has passed."""
        now = time.monotonic()
        everybody = (*self.running, *self.waiting)
        return [sequence for sequence in everybody if sequence.deadline is not None and sequence.deadline < now]

    def misguided(self) -> list[tuple[Sequence, RequestError]]:
        """Waiting sequences whose guide turned out to be none that can be followed, and why."""
        errors = [(each, each.guidance.error) for each in self.waiting if each.guidance is not None]
        return [(sequence, error) for sequence, error in errors if error is not None]

    # ---- one step

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step, or None if nothing can be computed now."""
        step = ScheduledStep(StepPlan([], [], []), [])
        self._schedule_decodes(step)
        budget = self._schedule_prefills(step, self._max_prefill_tokens)
        self._admit(step, budget)
        if not step.plan.work:
            return None
        step.put_decodes_first()
        step.plan.offloads = self.cache.take_offloads()
        return step

    def update(self, step: ScheduledStep, sampled: SampledStep) -> list[SequenceOutput]:
        """Take what an earlier step sampled; ends sequences that are complete.

        A finished sequence has left its row; what is cached of it is its `cached_prefix`.
        """
        for work, first, entries in sampled.prompt_logprobs:
            step.sequences[work].prompt_logprobs.update(enumerate(entries, first))
        outputs = []
        for index, (sequence, token) in enumerate(zip(step.sampled(), sampled.ids, strict=True)):
            sequence.num_pending -= 1
            if sequence.finished:
                continue
            output = self._take_id(sequence, token)
            if output.ids and index in sampled.logprobs:
                output.logprobs = [sampled.logprobs[index]]
            output.prompt_logprobs = [entry for _, entry in sorted(sequence.prompt_logprobs.items())]
            sequence.prompt_logprobs.clear()
            if output.ends:
                self.remove(sequence)
            outputs.append(output)
        return outputs

    def _take_id(self, sequence: Sequence, token: int) -> SequenceOutput:
        if token < 0:
            return SequenceOutput(sequence, [], error=_no_id_error(sequence))
        sequence.tokens.append(token)
        self.cache.name_full_blocks(sequence)
        if token in sequence.stop_ids:
            return SequenceOutput(sequence, [token], "stop")
        if sequence.num_generated >= sequence.max_tokens:
            return SequenceOutput(sequence, [token], sequence.limit_reason)
        return SequenceOutput(sequence, [token])

    def _schedule_decodes(self, step: ScheduledStep) -> None:
        for sequence in self._in_seniority_order():
            if sequence.num_uncomputed != 1 or sequence.all_tokens_in_flight:
                continue
            new_blocks = self._grow(sequence)
            if new_blocks is not None:
                self._compute(step, sequence, 1, new_blocks)

    def _schedule_prefills(self, step: ScheduledStep, budget: int) -> int:
        for sequence in self.running:
            if sequence.num_uncomputed > 1 and budget > 0:
                budget -= self._compute(step, sequence, min(budget, sequence.num_uncomputed), [])
        return budget

    def _admit(self, step: ScheduledStep, budget: int) -> None:
        for sequence in list(self.waiting):
            if not self._free_rows or budget <= 0:
                return
            if sequence.guidance is not None and not sequence.guidance.is_ready:
                continue  # its guide is being compiled: others may pass
            if sequence.num_pending:  # preempted with an id in flight: it is known at the next step
                return
            moves = self.cache.attach(sequence, num_reserved=len(self.running))
            if moves is None:
                return
            self.waiting.remove(sequence)
            self._start(step, sequence, moves)
            if moves.loads and step.plan.work:
                continue  # its blocks arrive while the others compute
            budget -= self._compute(step, sequence, min(budget, sequence.num_uncomputed), [])

    def _start(self, step: ScheduledStep, sequence: Sequence, moves: BlockMoves) -> None:
        sequence.row = heapq.heappop(self._free_rows)
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
        bisect.insort(self.running, sequence, key=_seniority)
        step.plan.copies += moves.copies
        step.plan.loads += moves.loads

    def _compute(self, step: ScheduledStep, sequence: Sequence, count: int, new_blocks: list[int]) -> int:
        assert sequence.row is not None
        if not sequence.is_started:
            step.plan.starts.append(_row_start(sequence, sequence.row))
            sequence.is_started = True
        start, end = sequence.num_computed, sequence.num_computed + count
        known = end <= len(sequence.tokens)
        ids = sequence.tokens[start:end] if known else None
        samples = end == sequence.length
        step.plan.work.append(RowWork(sequence.row, start, count, ids, new_blocks, samples))
        sequence.num_computed = end
        sequence.num_pending += samples
        step.sequences.append(sequence)
        return count

    # ---- memory

    def _in_seniority_order(self) -> Iterator[Sequence]:
        """The running sequences; one that is preempted meanwhile is passed over."""
        for sequence in list(self.running):
            if sequence.row is not None:
                yield sequence

    def _grow(self, sequence: Sequence) -> list[int] | None:
        """Blocks for one more token of a running sequence, preempting juniors, or None if it was itself."""
        while (new_blocks := self.cache.grow(sequence)) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return None
        return new_blocks

    def _preempt(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self.waiting, sequence, key=_seniority)

    def _stop_running(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self.cache.detach(sequence)
        if sequence.is_turn or not sequence.finished:
            self.cache.keep(sequence.cached_prefix)
        self.running.remove(sequence)
        heapq.heappush(self._free_rows, sequence.row)
        sequence.row = None
        sequence.is_started = False

    def check_integrity(self) -> None:
        """Raise AssertionError unless rows and blocks are owned by exactly the sequences that run."""
        rows = [sequence.row for sequence in self.running if sequence.row is not None]
        assert sorted([*rows, *self._free_rows]) == list(range(self.max_rows)), "rows are lost or owned twice"
        assert all(sequence.row is None and not sequence.blocks for sequence in self.waiting), "a waiter holds memory"
        for line in (self.running, self.waiting):
            assert line == sorted(line, key=_seniority), "a line is out of order"
        self.cache.check_integrity(block for sequence in self.running for block in sequence.blocks)


def _row_start(sequence: Sequence, row: int) -> RowStart:
    params = sequence.params
    tokens = list(sequence.tokens) if params.looks_back else []
    stop_ids = sorted(sequence.stop_ids) if params.min_tokens else []
    return RowStart(row, params, list(sequence.blocks), tokens, sequence.num_prompt, stop_ids)


def _seniority(sequence: Sequence) -> tuple[int, int]:
    return sequence.seniority


def _no_id_error(sequence: Sequence) -> RequestError:
    params = sequence.params
    if params.bad_words or params.min_tokens or params.guide is not None:
        reason = "response_format, bad_words and min_tokens exclude every token, or the logits are not finite."
        return RequestError("INVALID_ARG", f"No token is left to choose: {reason}")
    return RequestError("INTERNAL", "The model's logits are not finite: its weights or dtype are at fault.")
