"""limpet-bench serving: throughput and latencies of a running server, over gRPC or OpenAI's API.

    limpet-bench serving 127.0.0.1:33337 --concurrency 16
    limpet-bench serving http://127.0.0.1:23333 --rate 1 2 4 --plot rates.png

Requests are the seeded sharegpt-like set, pairs from a ShareGPT file (--sharegpt), or of fixed lengths (--input-len,
--output-len). They are sent at random times (--rate, Poisson; several rates one after the other), or so that
--concurrency of them are in flight. Greedy, end ids ignored. Each measurement prints a table and adds a line of JSON
to --output.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress

from limpet.benchmarks import result
from limpet.benchmarks.arguments import count, new_file, rate
from limpet.benchmarks.conversations import WorkloadError, sharegpt_file
from limpet.benchmarks.load_generator import LoadGenerator
from limpet.benchmarks.result import Part, Result
from limpet.benchmarks.serving_plot import draw
from limpet.benchmarks.serving_table import serving_table
from limpet.benchmarks.targets import Connection, ServedModel, Target, TargetError
from limpet.benchmarks.timing import Run, with_figures
from limpet.benchmarks.workload import Request, arrival_times, digest, sharegpt, uniform
from limpet.client import LimpetError
from limpet.client.wire import new_id

SHAREGPT_TOKENS = (236, 215)  # of a request, on average


@dataclass(frozen=True)
class Load:
    """How requests are sent: at a rate, or so many in flight."""

    rate: float | None = None
    concurrency: int | None = None

    def run(self, generator: LoadGenerator, requests: list[Request], description: str) -> Run:
        """All requests, with a progress bar."""
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task(description, total=len(requests))

            def show(num_done: int) -> None:
                progress.update(task, completed=num_done)

            if self.rate is not None:
                return generator.run_at(requests, arrival_times(len(requests), self.rate), show)
            return generator.run(requests, self.concurrency or len(requests), show)

    @property
    def label(self) -> str:
        return f"{self.rate:g} requests/s" if self.rate is not None else f"{self.concurrency} in flight"


@dataclass(frozen=True)
class Measurement:
    """One run of all requests under one load; `run` holds the answers that came."""

    load: Load
    run: Run
    num_failed: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the subcommand; 1 if a request failed."""
    options = _parser().parse_args(arguments)
    target = Target(options.target, options.model, options.key)
    try:
        with closing(target.connect()) as connection:
            served = connection.model()
            requests = _requests(options, connection, served)
        measurements = _measure_all(options, replace(target, model=served.name), served, requests)
    except (TargetError, WorkloadError, LimpetError) as error:
        print(f"limpet-bench serving: {error}", file=sys.stderr)
        return 1
    if options.plot is not None:
        draw(options.plot, [(each.load.rate, each.load.label, each.run) for each in measurements])
    return 1 if any(each.num_failed for each in measurements) else 0


def _requests(options: argparse.Namespace, connection: Connection, served: ServedModel) -> list[Request]:
    if options.sharegpt is not None:
        return sharegpt_file(options.sharegpt, options.num_requests, connection.tokenize)
    vocab_size = options.vocab_size or served.vocab_size
    if not vocab_size:
        raise WorkloadError("The server does not say how large its vocabulary is: give --vocab-size.")
    if options.input_len is not None:
        return uniform(vocab_size, options.num_requests, options.input_len, options.output_len)
    totals = (options.num_requests * each for each in SHAREGPT_TOKENS)
    return sharegpt(vocab_size, options.num_requests, *totals)


def _measure_all(
    options: argparse.Namespace, target: Target, served: ServedModel, requests: list[Request]
) -> list[Measurement]:
    loads = [Load(rate=rate) for rate in options.rate] or [Load(concurrency=options.concurrency)]
    output = options.output or result.result_path(result.cpu_machine(), "serving")
    base = Result(
        date=result.today(),
        commit=result.commit(),
        machine=result.cpu_machine(),
        torch="",
        engine=options.engine,
        model=served.name,
        part="rate" if options.rate else _part(options),
        dtype=served.dtype,
        block_size=served.block_size or None,
        digest=digest(requests),
        via="http" if target.is_http else "grpc",
    )
    measurements = []
    with closing(LoadGenerator(target, options.processes, keep_failures=True)) as generator:
        for _ in range(options.warm_up):
            generator.run(_salted(requests[:1]), 1)
        for load in loads:
            measurements.append(_measure(load, generator, requests))
            line = msgspec.structs.replace(base, rate=load.rate, concurrency=load.concurrency)
            result.append(output, [with_figures(line, [measurements[-1].run])])
            Console().print(serving_table(measurements[-1].run, measurements[-1].num_failed, load.label))
    return measurements


def _measure(load: Load, generator: LoadGenerator, requests: list[Request]) -> Measurement:
    run = load.run(generator, _salted(requests), load.label)
    answered = [answer for answer in run.answers if not answer.error]
    failures = [answer.error for answer in run.answers if answer.error]
    if failures:
        print(f"{len(failures)} requests failed, the first one: {failures[0]}", file=sys.stderr)
    if not answered:
        raise TargetError("No request was answered.")
    return Measurement(load, Run(answered, run.wall_s), len(failures))


def _salted(requests: list[Request]) -> list[Request]:
    """The requests as nobody sent them before: a prefix cache knows none of them from an earlier measurement."""
    salt = new_id()
    return [replace(request, cache_salt=salt) for request in requests]


def _part(options: argparse.Namespace) -> Part:
    return "sharegpt" if options.input_len is None else "fixed"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="limpet-bench serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="HOST:PORT (gRPC) or http://HOST:PORT (OpenAI's API)")
    add("--model", help="needed if the server has several")
    add("--key", default="", help="Bearer key of the endpoint")
    add("--num-requests", type=count, default=1000, help="default: %(default)s")
    workload = parser.add_mutually_exclusive_group()
    workload.add_argument("--sharegpt", type=Path, metavar="FILE", help="conversations in ShareGPT's JSON form")
    workload.add_argument("--input-len", type=count, metavar="N", help="prompts of N tokens each")
    add(
        "--output-len",
        type=count,
        default=128,
        metavar="N",
        help="answers with --input-len (default: %(default)s)",
    )
    add("--vocab-size", type=count, help="ids are drawn from so many (default: what the server says)")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--rate", type=rate, nargs="+", default=[], metavar="R", help="requests a second")
    pace.add_argument("--concurrency", type=count, default=256, metavar="N", help="in flight (default: %(default)s)")
    add("--processes", type=count, default=4, help="of the load generator (default: %(default)s)")
    add("--warm-up", type=int, default=1, metavar="N", help="requests before the measurement (default: %(default)s)")
    add("--engine", default="limpet", help="name of what is measured, for the JSON lines")
    add("--output", type=new_file, metavar="FILE", help="JSON lines (default: benchmarks/results/, or here)")
    add("--plot", type=new_file, metavar="FILE.png", help="draw TTFT, ITL, and throughput against rate")
    return parser
