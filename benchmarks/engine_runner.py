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
from limpet.benchmarks.workload import Request


class EngineRunner:
    """The engine on `threads` threads (CPU)."""

    def __init__(self, model_dir: Path, block_size: Literal[16, 32, 64, 128], threads: int) -> None:
        torch.set_num_threads(threads)
        config = EngineConfig(cache_block_seq_len=block_size, enable_prefix_caching=False)
        self._engine = LocalEngine(model_dir, config).engine

    def run(self, requests: list[Request], concurrency: int) -> Run:
        """Answer the requests in their order, `concurrency` of them in flight."""
        return answer_all(self._engine, requests, concurrency)


def answer_all(engine: Engine, requests: list[Request], concurrency: int) -> Run:
    """Answer the requests in their order, `concurrency` of them in flight."""
    started = time.monotonic()
    answers: list[Answer] = []
    num_running = 0
    while len(answers) < len(requests) or num_running:
        while len(answers) < len(requests) and num_running < concurrency:
            answers.append(_send(engine, len(answers), requests[len(answers)]))
            num_running += 1
        for output in engine.step():
            num_running -= _receive(engine, output, answers)
    return Run(answers, time.monotonic() - started)


def _send(engine: Engine, key: int, request: Request) -> Answer:
    params = SamplingParams(temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True)
    answer = Answer(time.monotonic(), num_input_tokens=len(request.prompt))
    engine.add(new_sequence(key, request.prompt, params, frozenset()))
    return answer


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
