"""This repository's engine in the measuring process, prefix caching off."""

import time
from pathlib import Path
from typing import Literal

import torch

from limpet.backend.config import EngineConfig
from limpet.backend.core import SequenceOutput
from limpet.backend.engine import Engine
from limpet.backend.offline import LocalEngine, new_sequence
from limpet.backend.sampling_params import SamplingParams
from limpet.benchmarks.timing import Answer, Run
from limpet.benchmarks.workload import Request, arrival_times


class EngineRunner:
    """The engine on `threads` threads (CPU)."""

    def __init__(self, model_dir: Path, block_size: Literal[16, 32, 64, 128], threads: int) -> None:
        torch.set_num_threads(threads)
        config = EngineConfig(cache_block_seq_len=block_size, enable_prefix_caching=False)
        self._engine = LocalEngine(model_dir, config).engine

    def run(self, requests: list[Request], concurrency: int) -> Run:
        """Answer the requests in their order, `concurrency` of them in flight."""
        return answer_all(self._engine, requests, concurrency)


def answer_all(engine: Engine, requests: list[Request], concurrency: int, rate: float | None = None) -> Run:
    """Answer the requests in their order, `concurrency` of them in flight, or `rate` a second sent at random times.

    An answer's time counts from when its request was due, also if a step made it wait.
    """
    started = time.monotonic()
    due = [started + seconds for seconds in arrival_times(len(requests), rate)] if rate else None
    answers: list[Answer] = []
    num_running = 0
    while len(answers) < len(requests) or num_running:
        now = time.monotonic()
        while (place := len(answers)) < len(requests) and num_running < concurrency and (not due or due[place] <= now):
            answers.append(_send(engine, place, requests[place], due[place] if due else time.monotonic()))
            num_running += 1
        if due and not num_running:
            time.sleep(max(0.0, due[len(answers)] - time.monotonic()))
        for output in engine.step():
            num_running -= _receive(engine, output, answers)
    return Run(answers, time.monotonic() - started)


def _send(engine: Engine, key: int, request: Request, sent_s: float) -> Answer:
    params = SamplingParams(temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True)
    engine.add(new_sequence(key, request.prompt, params, frozenset()))
    return Answer(sent_s, num_input_tokens=len(request.prompt))


def _receive(engine: Engine, output: SequenceOutput, answers: list[Answer]) -> bool:
    """Whether the request has ended."""
    if output.error is not None:
        raise output.error
    sequence = output.sequence
    assert isinstance(sequence.key, int)
    answer = answers[sequence.key]
    answer.arrivals.append((time.monotonic(), len(output.ids)))
    answer.last_id = output.ids[-1]
    if output.ends:
        answer.num_cached_tokens = sequence.num_cached or 0
        engine.discard(sequence)
    return output.ends
