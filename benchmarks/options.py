"""What a request's options cost the step that it shares: logprobs, penalties and guided decoding beside plain requests.

    python -m benchmarks.options workspace/model_repository/smollm2

Requests decode together, in process and greedy; one of them or all have an option. The cases take turns, so that they
meet the same machine. Writes benchmarks/results/<date>-<machine>-options.jsonl.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from msgspec.structs import replace
from rich.progress import track

from limpet.backend.config import EngineConfig
from limpet.backend.engine import Engine
from limpet.backend.offline import LocalEngine, new_sequence
from limpet.backend.sampling_params import Guide, SamplingParams
from limpet.benchmarks import result
from limpet.benchmarks.engine_result import engine_result
from limpet.benchmarks.result import Result
from limpet.benchmarks.table import write_page
from limpet.benchmarks.workload import Request, digest, uniform

PROMPT_TOKENS, WARM_STEPS, STEPS = 64, 4, 40
# A list of strings, numbers and choices that is longer than an answer may be.
SCHEMA = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "size": {"type": "integer"}, "kind": {"enum": ["rock", "sand"]}},
        "required": ["name", "size", "kind"],
    },
}
PLAIN = SamplingParams(temperature=0.0, max_tokens=WARM_STEPS + STEPS + 2, ignore_eos=True)
OPTIONS = {
    "logprobs of 5": replace(PLAIN, logprobs=5),
    "repetition_penalty": replace(PLAIN, repetition_penalty=1.1),
    "json_schema": replace(PLAIN, guide=Guide("json_schema", json.dumps(SCHEMA))),
}


def main() -> None:
    arguments = _parse()
    cases = _cases(arguments.concurrency)
    times: dict[str, list[float]] = {name: [] for name in cases}
    config = EngineConfig(max_batch_size=arguments.concurrency, enable_prefix_caching=False)
    with LocalEngine(arguments.model, config) as local:
        requests = uniform(local.engine.vocab_size, arguments.concurrency, PROMPT_TOKENS, STEPS)
        for number in track(range(arguments.rounds + 1), description="Measuring"):
            for name, params in cases.items():
                step_ms = _step_ms(local.engine, requests, params)
                if number:  # the first round is the warm-up
                    times[name].append(step_ms)
        lines = [_line(arguments, local, requests, name, measured) for name, measured in times.items()]
    result.append(result.result_path(lines[0].machine, "options"), lines)
    write_page()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a converted model's folder")
    parser.add_argument("--concurrency", type=int, default=8, help="requests that decode together")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def _cases(concurrency: int) -> dict[str, list[SamplingParams]]:
    """The settings of every request in each case."""
    cases = {"all plain": [PLAIN] * concurrency}
    for name, params in OPTIONS.items():
        cases[f"one with {name}"] = [params] + [PLAIN] * (concurrency - 1)
        cases[f"all with {name}"] = [params] * concurrency
    return cases


def _step_ms(engine: Engine, requests: list[Request], params: list[SamplingParams]) -> float:
    """Milliseconds of a step while all decode."""
    sequences = [
        new_sequence(number, request.prompt, settings, frozenset())
        for number, (request, settings) in enumerate(zip(requests, params, strict=True))
    ]
    for sequence in sequences:
        engine.add(sequence)
        if sequence.guidance is not None:
            sequence.guidance.wait()
    while min(sequence.num_generated for sequence in sequences) < WARM_STEPS:
        engine.step()
    started = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    step_ms = (time.perf_counter() - started) / STEPS * 1000
    while engine.has_work:
        engine.step()
    for sequence in sequences:
        engine.discard(sequence)
    return step_ms


def _line(
    arguments: argparse.Namespace, local: LocalEngine, requests: list[Request], name: str, times: list[float]
) -> Result:
    return engine_result(
        local,
        arguments.model,
        engine=f"limpet, {name}",
        part="options",
        concurrency=len(requests),
        digest=digest(requests),
        req=len(requests),
        in_tok=PROMPT_TOKENS,
        runs=len(times),
        step_ms=round(statistics.median(times), 3),
    )


if __name__ == "__main__":
    main()
