"""The engine: one step on one screen, with one step in flight.

`step` plans and launches a step while the one before is still running, then reads the earlier one's ids. Where guided
decoding needs those ids to say what the next may be, the forward pass is launched all the same and only its sampling
waits for them. A plain class: the engine process, offline use (`limpet.backend.offline`), tests and benchmarks all
drive it the same way.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from limpet.backend.cache_manager import CacheManager
from limpet.backend.core import CachedPrefix, RequestError, SampledStep, Sequence, SequenceOutput
from limpet.backend.guide_compiler import GuideCompiler
from limpet.backend.ranks.leader import Leader
from limpet.backend.runner import ForwardHandle, Runner
from limpet.backend.scheduler import ScheduledStep, Scheduler
from limpet.backend.token_masks import TokenMasks

_NO_ID = -1


@dataclass
class StepInFlight:
    """A launched step; `sampled` is None as long as its guided rows wait for the ids of the step before."""

    step: ScheduledStep
    handle: ForwardHandle
    on_ready: Callable[[], None] | None
    launched_at: float
    sampled: "Future[SampledStep] | None" = None


class Engine:
    """Scheduler, cache and runner of one model. Not thread-safe: one thread drives it.

    `session_len` is the longest context (prompt and answer) that is served.
    """

    def __init__(
        self,
        runner: Runner | Leader,
        scheduler: Scheduler,
        cache: CacheManager,
        *,
        session_len: int,
        vocab_size: int,
        guides: GuideCompiler | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.cache = cache
        self.guides = guides
        self.session_len = session_len
        self.vocab_size = vocab_size
        self.num_steps = 0  # completed
        self.last_step_s = 0.0  # the last completed step, from its launch to its ids
        self._in_flight: deque[StepInFlight] = deque()

    def add(self, sequence: Sequence) -> None:
        """Queue a request; raises RequestError if it can never be served or the queue is full."""
        self._validate(sequence)
        room = self.session_len - len(sequence.tokens)
        if sequence.max_tokens > room:
            sequence.max_tokens, sequence.limit_reason = room, "context_full"
        if sequence.params.guide is not None:
            assert self.guides is not None, "this engine has no compiler for guides"
            sequence.guidance = self.guides.begin(sequence.params.guide)
        self.scheduler.add(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Take a request out before it ends."""
        if not sequence.finished:
            self.scheduler.remove(sequence)

    def cached(self, sequence: Sequence, num_tokens: int) -> CachedPrefix:
        """What is cached of an ended request's first `num_tokens` tokens."""
        return sequence.cached_prefix.first(num_tokens, self.cache.pool.block_size)

    def discard(self, sequence: Sequence) -> None:
        """Nobody will come back for an ended request's keys and values."""
        self.cache.drop(sequence.cached_prefix)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    def step(self) -> list[SequenceOutput]:
        """Launch the next step, then take the ids of the one before; waits for those."""
        launched = self.launch()
        return self.collect() if self._in_flight and (len(self._in_flight) > 1 or not launched) else []

    def launch(self, on_ready: Callable[[], None] | None = None) -> bool:
        """Plan and queue a step; False if there is nothing to compute."""
        step = self.scheduler.schedule()
        if step is None:
            return False
        launched = StepInFlight(step, self.runner.forward(step.plan), on_ready, time.monotonic())
        self._in_flight.append(launched)
        if not any(sequence.guidance is not None and sequence.num_pending > 1 for sequence in step.sampled()):
            self._sample(launched)
        return True

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def is_ready(self) -> bool:
        """The oldest step in flight has its ids."""
        sampled = self._in_flight[0].sampled if self._in_flight else None
        return sampled is not None and sampled.done()

    def collect(self) -> list[SequenceOutput]:
        """Wait for the oldest step in flight and hand out what it gave."""
        collected = self._in_flight.popleft()
        assert collected.sampled is not None, "the oldest step in flight waits for no other"
        sampled = collected.sampled.result()
        self._advance_guidance(collected.step, sampled.ids)
        for launched in self._in_flight:
            if launched.sampled is None:
                self._sample(launched)
        outputs = self.scheduler.update(collected.step, sampled)
        self.num_steps += 1
        self.last_step_s = time.monotonic() - collected.launched_at
        return outputs

    def _sample(self, launched: StepInFlight) -> None:
        masks = self._token_masks(launched.step.sampled())
        launched.sampled = self.runner.sample(launched.handle, masks, launched.on_ready)

    def _token_masks(self, sequences: list[Sequence]) -> TokenMasks | None:
        """The ids that the guided ones of a step's sampled sequences may go on with."""
        guided = {
            place: sequence.guidance
            for place, sequence in enumerate(sequences)
            if sequence.guidance is not None and not sequence.finished and not sequence.guidance.is_over
        }
        if not guided or self.guides is None:
            return None
        return TokenMasks(list(guided), self.guides.fill(list(guided.values())))

    def _advance_guidance(self, step: ScheduledStep, ids: list[int]) -> None:
        """Let each guided answer take its new id; one that its grammar does not take is none."""
        for place, sequence in enumerate(step.sampled()):
            guidance = sequence.guidance
            if guidance is not None and not sequence.finished and ids[place] >= 0 and not guidance.accept(ids[place]):
                ids[place] = _NO_ID

    def check_integrity(self) -> None:
        """Raise AssertionError unless every row and block is accounted for."""
        self.scheduler.check_integrity()

    def close(self) -> None:
        while self._in_flight:
            self.collect()
        self.runner.close()
        if self.guides is not None:
            self.guides.close()

    def _validate(self, sequence: Sequence) -> None:
        num_tokens = len(sequence.tokens)
        if num_tokens == 0:
            raise RequestError("INVALID_ARG", "The prompt is empty: at least one token is needed.")
        if num_tokens >= self.session_len:
            raise RequestError(
                "INVALID_ARG",
                f"The prompt has {num_tokens} tokens; with room for one token of answer at most "
                f"{self.session_len - 1} fit into the context of {self.session_len}.",
            )
        wrong = next((t for t in (min(sequence.tokens), max(sequence.tokens)) if not 0 <= t < self.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                "INVALID_ARG", f"Token id {wrong} is outside the vocabulary (0 … {self.vocab_size - 1})."
            )
