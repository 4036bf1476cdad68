"""SmolLM2-135M in float32 on this machine's CPU: in process, through gRPC and limpet-api, and transformers beside it.

    python -m benchmarks.cpu .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf

Writes benchmarks/results/<date>-<machine>-cpu.jsonl, then `python -m benchmarks.table` renders docs/benchmarks.md.
The contenders take turns within each repetition, so that a change of the machine's speed meets all of them.
"""

import argparse
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec
from rich.progress import track

from limpet.benchmarks import result
from limpet.benchmarks.child_command import Finished, Server, endpoint, free_ports, run_command, serve
from limpet.benchmarks.contender import Contender, Runner
from limpet.benchmarks.load_generator import LoadGenerator
from limpet.benchmarks.result import Result
from limpet.benchmarks.targets import Target
from limpet.benchmarks.timing import Run, with_figures
from limpet.benchmarks.workload import digest, uniform

VOCAB_SIZE = 49152
BLOCK_SIZE: Final = 64
NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 64, 32
ENGINE_STREAMS = (1, 4, 8, 16)  # 1 and 8 are the goals, 1, 4 and 16 stand beside the served ones
SERVED_STREAMS = (1, 4, 16)


@dataclass(frozen=True)
class Measured:
    """A contender at one concurrency."""

    name: str
    runner: Runner
    concurrency: int
    via: str


def main() -> None:
    options = _parse()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # for the children
    base = Result(
        date=result.today(),
        commit=result.commit(),
        machine=result.cpu_machine(),
        torch=version("torch"),
        engine="limpet",
        model="SmolLM2-135M-Instruct",
        part="fixed",
        dtype="float32",
        threads=options.threads,
    )
    path = result.result_path(base.machine, "cpu")
    with tempfile.TemporaryDirectory(prefix="limpet-bench-") as scratch:
        workspace = Path(scratch)
        flags = ("--name=smollm2", "--enable-prefix-caching=false", f"--cache-block-seq-len={BLOCK_SIZE}")
        converted = run_command("limpet-convert", str(options.gguf), f"--dst={workspace}", *flags)
        result.append(path, [_conversion(base, converted)])
        result.append(path, _measure(base, options, workspace / "model_repository"))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def _measure(base: Result, options: argparse.Namespace, repository: Path) -> list[Result]:
    with ExitStack() as stack:
        peer = stack.enter_context(Contender(_transformers, options.gguf, options.threads))
        ours = stack.enter_context(Contender(_engine, repository / "smollm2", options.threads))
        server = stack.enter_context(serve(repository, free_ports(), options.threads))
        load = stack.enter_context(closing(LoadGenerator(Target(server.address))))
        http = stack.enter_context(closing(LoadGenerator(Target(stack.enter_context(endpoint(server.address))))))
        measured = [
            Measured(f"transformers {version('transformers')}", peer, 1, "engine"),
            *(Measured("limpet", ours, streams, "engine") for streams in ENGINE_STREAMS),
            *(Measured("limpet", load, streams, "grpc") for streams in SERVED_STREAMS),
            *(Measured("limpet", http, streams, "http") for streams in SERVED_STREAMS),
        ]
        runs = _take_turns(measured, options.repeats)
        speeds = [_speed(base, each, runs[index]) for index, each in enumerate(measured)]
        return [*speeds, *_serving(base, server)]


# The load generator's processes import this module as well: what brings torch is imported by the contenders alone.


def _transformers(gguf: Path, threads: int) -> Runner:
    from limpet.benchmarks.transformers_runner import TransformersRunner

    return TransformersRunner(gguf, threads)


def _engine(model_dir: Path, threads: int) -> Runner:
    from limpet.benchmarks.engine_runner import EngineRunner

    return EngineRunner(model_dir, BLOCK_SIZE, threads)


def _take_turns(measured: list[Measured], repeats: int) -> dict[int, list[Run]]:
    """Every contender warms up, then each repetition runs all of them one after the other."""
    warm_up = uniform(VOCAB_SIZE, NUM_REQUESTS, PROMPT_TOKENS, 2, repeat=1)
    for each in measured:
        each.runner.run(warm_up, each.concurrency)
    requests = uniform(VOCAB_SIZE, NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS)
    runs: defaultdict[int, list[Run]] = defaultdict(list)
    turns = [index for _ in range(repeats) for index in range(len(measured))]
    for index in track(turns, description="Measuring"):
        runs[index].append(measured[index].runner.run(requests, measured[index].concurrency))
    return runs


def _speed(base: Result, measured: Measured, runs: list[Run]) -> Result:
    is_ours = measured.name == base.engine
    requests = uniform(VOCAB_SIZE, NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS)
    described = msgspec.structs.replace(
        base,
        engine=measured.name,
        concurrency=measured.concurrency,
        via=measured.via,
        block_size=BLOCK_SIZE if is_ours else None,
        digest=digest(requests),
    )
    return with_figures(described, runs)


def _conversion(base: Result, finished: Finished) -> Result:
    return msgspec.structs.replace(
        base, part="convert", wall_s=round(finished.wall_s, 2), mem_gb=_gigabytes(finished.peak_bytes)
    )


def _serving(base: Result, server: Server) -> Iterator[Result]:
    replace = msgspec.structs.replace
    served = replace(base, via="grpc")
    yield replace(served, part="start", wall_s=round(server.start_s, 2))
    yield replace(served, part="memory", mem_gb=_gigabytes(server.peak_bytes()))
    yield replace(base, part="memory", mem_gb=_gigabytes(server.peak_bytes(only="limpet.backend")))


def _gigabytes(num_bytes: int) -> float:
    return round(num_bytes / 1e9, 3)


if __name__ == "__main__":
    main()
