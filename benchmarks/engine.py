"""The engine in this process on one device, with random weights of a well-known model's shape.

    limpet-bench engine --model llama-2-7b --block-size 64

Writes benchmarks/results/<date>-<device>-engine.jsonl (or --output) and prints a table.
"""

import argparse
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch

from limpet.backend.config import ConfigError, EngineConfig
from limpet.backend.core import RequestError
from limpet.backend.engine import Engine
from limpet.backend.offline import LocalEngine
from limpet.benchmarks import result
from limpet.benchmarks.arguments import count, new_file
from limpet.benchmarks.engine_runner import answer_all
from limpet.benchmarks.model_shapes import SHAPES, write_shape
from limpet.benchmarks.result import Part, Result
from limpet.benchmarks.timing import Run, steady_step_ms, with_figures
from limpet.benchmarks.workload import Request, digest, sharegpt, uniform, warm_up

GIGABYTE = 10**9

# Requests, how many of them in flight, and a rate if that many are sent a second.
Answerer: TypeAlias = Callable[[list[Request], int, float | None], Run]


@dataclass(frozen=True)
class Workload:
    """Requests of one part; `make(vocab_size, repeat)` gives other ids for another repeat."""

    part: Part
    concurrency: int
    make: Callable[[int, int], list[Request]]
    rate: float | None = None  # requests a second, sent at random times (Poisson)


def _decode(batch: int) -> Workload:
    return Workload("decode", batch, lambda vocab, repeat: uniform(vocab, batch, 128, 256, repeat))


WORKLOADS = {
    "decode-1": _decode(1),
    "decode-16": _decode(16),
    "decode-64": _decode(64),
    "decode-256": _decode(256),
    "prefill": Workload("prefill", 16, lambda vocab, repeat: uniform(vocab, 16, 2048, 1, repeat)),
    "sharegpt": Workload("sharegpt", 256, lambda vocab, repeat: sharegpt(vocab)),
    "rate": Workload("rate", 1000, lambda vocab, repeat: sharegpt(vocab), rate=128.0),
    "fixed": Workload("fixed", 64, lambda vocab, repeat: uniform(vocab, 64, 2048, 2048, repeat)),
}


def run_all(
    answer: Answerer, workload: Workload, vocab_size: int, num_runs: int, base: Result
) -> tuple[Result, list[Run]]:
    """The figures of the median of so many runs, after one of shorter answers that nobody counts; and the runs."""
    first, *requests = (workload.make(vocab_size, repeat) for repeat in range(num_runs + 1))
    answer(warm_up(first), workload.concurrency, None)
    runs = [answer(each, workload.concurrency, workload.rate) for each in requests]
    named = msgspec.structs.replace(
        base, part=workload.part, concurrency=workload.concurrency, rate=workload.rate, digest=digest(requests[0])
    )
    return with_figures(named, runs), runs


def measure(engine: Engine, workload: Workload, num_runs: int, base: Result) -> Result:
    """The figures of the engine in this process; of decode, those of a steady step."""
    measured, runs = run_all(partial(answer_all, engine), workload, engine.vocab_size, num_runs, base)
    if workload.part == "decode":
        step_ms = sorted(map(steady_step_ms, runs))[num_runs // 2]
        out_tok_s = round(1e3 * workload.concurrency / step_ms, 2)
        measured = msgspec.structs.replace(measured, step_ms=round(step_ms, 3), out_tok_s=out_tok_s)
    return measured


def template(model: str, gpu: str, dtype: str, commit: str | None) -> Result:
    """A result without figures; `gpu` is its name, "" on a CPU."""
    return Result(
        date=result.today(),
        commit=commit or result.commit(),
        machine=f"{platform.machine()} {os.cpu_count()}-core",
        gpu=gpu,
        torch=str(torch.__version__),
        triton=_version("triton") if gpu else "",
        engine="limpet",
        model=model,
        part="decode",
        dtype=dtype,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _row(measured: Result) -> str:
    figures = (measured.step_ms, measured.out_tok_s, measured.in_tok_s, measured.req_s, measured.ttft_ms_p50)
    numbers = "".join(f"{figure:12.2f}" if figure is not None else f"{'':12}" for figure in figures)
    return f"{measured.part:9}{measured.concurrency:5}{numbers}{measured.distinct_last:10}  {measured.digest}"


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="limpet-bench engine", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=SHAPES, default="llama-2-7b")
    parser.add_argument("--layers", type=count, help="so many of the model's")
    parser.add_argument("--tp", type=count, default=1, help="GPUs, or CPU processes, that share the model")
    parser.add_argument("--all-reduce", choices=("auto", "nccl"), default="auto")
    parser.add_argument("--block-size", type=int, choices=(16, 32, 64, 128), default=64)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--slots", type=count, default=256)
    parser.add_argument("--session-len", type=count, default=4096)
    parser.add_argument("--prefill-tokens", type=count, default=8192)
    parser.add_argument("--parts", nargs="+", choices=WORKLOADS, default=list(WORKLOADS)[:-2])
    parser.add_argument("--runs", type=count, default=3)
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--output", type=new_file)
    return parser.parse_args(given)


def _config(arguments: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        max_batch_size=arguments.slots,
        session_len=arguments.session_len,
        max_prefill_token_num=arguments.prefill_tokens,
        cache_block_seq_len=arguments.block_size,
        enable_prefix_caching=False,
        dtype=arguments.dtype,
        device=arguments.device,
        load_format="dummy",
        deterministic=arguments.deterministic,
        tp=arguments.tp,
        all_reduce=arguments.all_reduce,
    )


def _measure_all(local: LocalEngine, arguments: argparse.Namespace) -> None:
    name = arguments.model if arguments.layers is None else f"{arguments.model}, {arguments.layers} layers"
    print(name, *local.summary.lines(), sep="\n  ", flush=True)
    gpu = "" if local.summary.device == "cpu" else torch.cuda.get_device_name(0)
    base = msgspec.structs.replace(
        template(name, gpu, arguments.dtype, arguments.commit),
        tp=arguments.tp,
        block_size=arguments.block_size,
        deterministic=arguments.deterministic,
    )
    output = arguments.output or result.result_path(gpu or "cpu", "engine")
    columns = ("ms/step", "out tok/s", "in tok/s", "req/s", "TTFT p50 ms")
    print(f"{'part':9}{'conc':>5}", *(f"{column:>11}" for column in columns), "  distinct  digest")
    for part in arguments.parts:
        measured = measure(local.engine, WORKLOADS[part], arguments.runs, base)
        if local.summary.device != "cpu":
            free, total = torch.cuda.mem_get_info()
            measured = msgspec.structs.replace(measured, mem_gb=round((total - free) / GIGABYTE, 2))
        result.append(output, [measured])
        print(_row(measured), flush=True)
    if local.summary.device != "cpu":
        free, total = torch.cuda.mem_get_info()
        share = (total - free) / local.summary.total_bytes
        print(f"device memory in use: {(total - free) / 2**30:.2f} GiB, {share:.1%} of what was summed up at the start")


def main(given: Sequence[str] | None = None) -> int:
    """Entry point of the subcommand; 1 if the settings cannot serve the requests."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = _arguments(given)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_shape(arguments.model, Path(folder), arguments.layers)
        try:
            with LocalEngine(model_dir, _config(arguments)) as local:
                _measure_all(local, arguments)
        except (ConfigError, RequestError) as error:
            print(f"limpet-bench engine: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    main()
