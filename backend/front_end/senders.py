"""The threads that send responses, each with streams of its own.

Triton aborts if two threads use one response sender, so every stream belongs to one thread for its life; that thread
also runs the stream's state machine and polls its cancel flag. While a thread is busy sending, what arrives for its
streams gathers, and goes out in one response each: with few streams every token is its own response, with many nothing
falls behind.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import cycle
from queue import Empty, SimpleQueue
from typing import Protocol, TypeAlias

NUM_SENDERS = 4  # more do not send faster beside one server process
POLL_EVERY_S = 0.3
MAX_POLLS_PER_S = 1000  # of all threads together: a poll costs about 50 us in the server
_logger = logging.getLogger(__name__)

Job: TypeAlias = Callable[[], None]


class Stream(Protocol):
    """What a sender thread looks after."""

    @property
    def is_done(self) -> bool: ...

    def poll_cancel(self) -> None: ...


class SenderThread:
    """Runs the jobs of its streams in order, and in between polls which clients have gone."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._polls: deque[tuple[float, Stream]] = deque()  # when each stream is due, the earliest first
        self._next_poll = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, stream: Stream) -> None:
        """Poll this stream until it is done; from any thread."""
        self._jobs.put(lambda: self._polls.append((time.monotonic() + POLL_EVERY_S, stream)))

    def run(self, job: Job) -> None:
        """Run `job` on this thread, after what was queued before; from any thread."""
        self._jobs.put(job)

    def stop(self) -> None:
        """End the thread after the queued jobs."""
        self._jobs.put(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._next_job()()
                self._poll_one()
            except Exception:
                _logger.exception("A sender thread goes on after an error.")

    def _next_job(self) -> Job:
        try:
            if not self._polls:
                return self._jobs.get()
            due = max(self._polls[0][0], self._next_poll)
            return self._jobs.get(timeout=max(0.0, due - time.monotonic()))
        except Empty:
            return lambda: None

    def _poll_one(self) -> None:
        """Poll the stream that has waited longest, if it is due and the rate allows it."""
        now = time.monotonic()
        if not self._polls or now < max(self._polls[0][0], self._next_poll):
            return
        _, stream = self._polls.popleft()
        if not stream.is_done:
            self._next_poll = now + NUM_SENDERS / MAX_POLLS_PER_S
            self._polls.append((now + POLL_EVERY_S, stream))
            stream.poll_cancel()


class SenderPool:
    """Deals streams out to the threads."""

    def __init__(self) -> None:
        self._threads = [SenderThread(f"limpet-sender-{number}") for number in range(NUM_SENDERS)]
        self._turns = cycle(self._threads)

    def next_thread(self) -> SenderThread:
        """The thread for a new stream; called from Triton's thread only."""
        return next(self._turns)

    def stop(self) -> None:
        """End all threads after their queued jobs."""
        for thread in self._threads:
            thread.stop()
