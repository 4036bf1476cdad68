"""The load generator: streams over gRPC to a running server, from several processes."""

import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

from limpet.benchmarks.timing import Answer, Run
from limpet.benchmarks.workload import Request
from limpet.client import Client

class GrpcRunner:
    """Clients of a model of the server at `address`, in processes that stay alive between runs."""

    def __init__(self, address: str, model: str | None = None, num_processes: int = 4) -> None:
        self._address = address
        self._model = model
        self._num_processes = num_processes
        self._processes = ProcessPoolExecutor(num_processes, get_context("spawn"))

    def run(self, requests: list[Request], concurrency: int) -> Run:
        """Answer the requests over `concurrency` streams, each of which sends its next one when one has ended."""
        shares = [requests[stream::concurrency] for stream in range(concurrency)]
        num_processes = min(self._num_processes, concurrency)
        started = time.monotonic()
        futures = [
            self._processes.submit(_stream_all, self._address, self._model, shares[process::num_processes])
            for process in range(num_processes)
        ]
        answers = [answer for future in futures for answer in future.result()]
        return Run(answers, time.monotonic() - started)

    def close(self) -> None:
        self._processes.shutdown()


def _stream_all(address: str, model: str | None, shares: list[list[Request]]) -> list[Answer]:
    """In a load process: one thread a stream."""
    with Client(address, model=model) as client, ThreadPoolExecutor(len(shares)) as threads:
        streams = threads.map(lambda share: [_stream(client, request) for request in share], shares)
        return [answer for answers in streams for answer in answers]


def _stream(client: Client, request: Request) -> Answer:
    answer = Answer(time.monotonic())
    ids: Sequence[int] = ()
    options = {"max_tokens": request.num_output_tokens, "temperature": 0.0, "ignore_eos": True}
    with client.generate(input_ids=request.prompt, stream=True, **options) as stream:  # type: ignore[call-overload]
        for chunk in stream:
            if chunk.num_output_tokens:
                answer.arrivals.append((time.monotonic(), chunk.num_output_tokens))
                ids = chunk.output_ids or ids
            answer.num_input_tokens, answer.num_cached_tokens = chunk.num_input_tokens, chunk.num_cached_tokens
    answer.last_id = ids[-1]
    return answer
