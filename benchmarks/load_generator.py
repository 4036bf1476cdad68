"""The load generator: several processes send requests to a server, each with one thread a stream."""

import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from multiprocessing import get_context
from typing import Any

from limpet.benchmarks.targets import Connection, Target, TargetError
from limpet.benchmarks.timing import Answer, Run
from limpet.benchmarks.workload import Request

START_S = 0.2  # from handing out the work to the first request
WATCH_EVERY_S = 0.2

_connection: Connection  # of this child process
_num_begun: Any  # counts requests that a stream of any process took
_num_done: Any  # counts all processes' ended requests


class LoadGenerator:
    """Processes that stay alive between runs; they are up and connected when the constructor returns.

    A request that fails raises TargetError, or with `keep_failures` is an answer with its `error`.
    """

    def __init__(self, target: Target, num_processes: int = 4, *, keep_failures: bool = False) -> None:
        self._keep_failures = keep_failures
        context = get_context("spawn")
        self._num_begun, self._num_done = context.Value("q", 0), context.Value("q", 0)
        self._num_processes = num_processes
        all_up = context.Barrier(num_processes)
        self._processes = ProcessPoolExecutor(
            num_processes, context, initializer=_connect, initargs=(target, self._num_begun, self._num_done, all_up)
        )
        wait([self._processes.submit(_nothing) for _ in range(num_processes)])

    def run(
        self, requests: list[Request], concurrency: int, on_progress: Callable[[int], None] = lambda done: None
    ) -> Run:
        """Answer the requests in their order over `concurrency` streams: one that has its answer takes the next."""
        self._num_begun.value = 0
        streams = range(min(concurrency, len(requests)))
        shares = [len(streams[process :: self._num_processes]) for process in range(self._num_processes)]
        return self._run(_answer_next, [(requests, share) for share in shares if share], on_progress)

    def run_at(
        self,
        requests: list[Request],
        offsets_s: Sequence[float],
        on_progress: Callable[[int], None] = lambda done: None,
    ) -> Run:
        """Send each request at its time after the start, however many are running."""
        arrivals = list(zip(offsets_s, requests, strict=True))
        shares = [arrivals[process :: self._num_processes] for process in range(self._num_processes)]
        return self._run(_answer_arrivals, [(share,) for share in shares if share], on_progress)

    def close(self) -> None:
        self._processes.shutdown()

    def _run(self, work: Any, shares: list[Any], on_progress: Callable[[int], None]) -> Run:
        """`work(start, *share)` for each share, in a process of its own."""
        self._num_done.value = 0
        start = time.monotonic() + START_S
        futures: list[Future[list[Answer]]] = [self._processes.submit(work, start, *share) for share in shares]
        while wait(futures, WATCH_EVERY_S).not_done:
            on_progress(self._num_done.value)
        answers = list(itertools.chain.from_iterable(future.result() for future in futures))
        on_progress(self._num_done.value)
        if not self._keep_failures and (failures := [answer.error for answer in answers if answer.error]):
            raise TargetError(failures[0])
        return Run(answers, max(answer.ended_s for answer in answers) - start)


def _connect(target: Target, num_begun: Any, num_done: Any, all_up: "multiprocessing.synchronize.Barrier") -> None:
    global _connection, _num_begun, _num_done
    _connection, _num_begun, _num_done = target.connect(), num_begun, num_done
    all_up.wait()


def _nothing() -> None:
    """Makes the pool start one more process."""


def _answer_next(start: float, requests: list[Request], num_streams: int) -> list[Answer]:
    with ThreadPoolExecutor(num_streams) as threads:
        _sleep_until(start)
        each = threads.map(lambda _: [_answer(request) for request in _taken(requests)], range(num_streams))
        return list(itertools.chain.from_iterable(each))


def _taken(requests: list[Request]) -> Iterator[Request]:
    """Of all requests those that no other stream of any process took, while there are any."""
    while True:
        with _num_begun.get_lock():
            place = _num_begun.value
            _num_begun.value += 1
        if place >= len(requests):
            return
        yield requests[place]


def _answer_arrivals(start: float, arrivals: list[tuple[float, Request]]) -> list[Answer]:
    with ThreadPoolExecutor(len(arrivals)) as threads:
        futures = []
        for offset_s, request in arrivals:
            _sleep_until(start + offset_s)
            futures.append(threads.submit(_answer, request))
        return [future.result() for future in futures]


def _answer(request: Request) -> Answer:
    sent_s = time.monotonic()
    try:
        answer = _connection.answer(request)
    except TargetError as error:
        answer = Answer(sent_s, error=str(error))
    answer.ended_s = time.monotonic()
    with _num_done.get_lock():
        _num_done.value += 1
    return answer


def _sleep_until(moment: float) -> None:
    if (left := moment - time.monotonic()) > 0:
        time.sleep(left)
