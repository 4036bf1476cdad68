"""The engine: one step on one screen, with one step in flight.

`step` plans and launches a step while the one before is still running, then reads the earlier one's ids. A plain class:
the engine process, offline use (`limpet.backend.offline`), tests and benchmarks all drive it the same way.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from limpet.backend.cache_manager import CacheManager
from limpet.backend.core import CachedPrefix, RequestError, SampledStep, Sequence, SequenceOutput
from limpet.backend.runner import Runner
from limpet.backend.scheduler import ScheduledStep, Scheduler


class Engine:
    """Scheduler, cache and runner of one model. Not thread-safe: one thread drives it.

    `session_len` is the longest context (prompt and answer) that is served.
    """

    def __init__(
        self, runner: Runner, scheduler: Scheduler, cache: CacheManager, *, session_len: int, vocab_size: int
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.cache = cache
        self.session_len = session_len
        self.vocab_size = vocab_size
        self.num_steps = 0  # completed
        self.last_step_s = 0.0  # the last completed step, from its launch to its ids
        self._in_flight: deque[tuple[ScheduledStep, Future[SampledStep], float]] = deque()

    def add(self, sequence: Sequence) -> None:
        """Queue a request; raises RequestError if it can never be served or the queue is full."""
        self._validate(sequence)
        room = self.session_len - len(sequence.tokens)
        if sequence.max_tokens > room:
            sequence.max_tokens, sequence.limit_reason = room, "context_full"
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
        handle = self.runner.forward(step.plan)
        self._in_flight.append((step, self.runner.sample(handle, on_ready), time.monotonic()))
        return True

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def is_ready(self) -> bool:
        """The oldest step in flight has its ids."""
        return bool(self._in_flight) and self._in_flight[0][1].done()

    def collect(self) -> list[SequenceOutput]:
        """Wait for the oldest step in flight and hand out what it gave."""
        step, sampled, launched_at = self._in_flight.popleft()
        outputs = self.scheduler.update(step, sampled.result())
        self.num_steps += 1
        self.last_step_s = time.monotonic() - launched_at
        return outputs

    def check_integrity(self) -> None:
        """Raise AssertionError unless every row and block is accounted for."""
        self.scheduler.check_integrity()

    def close(self) -> None:
        while self._in_flight:
            self.collect()
        self.runner.close()

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
