"""Time to the first token of a session's turns, beside the same conversation sent whole each time.

    limpet-bench turns workspace/model_repository/smollm2 --histories 512 2048 6144

A session begins with a history; then come turns of so many new tokens each. In process, greedy, prefix caching off:
what a turn reuses is its session's own. Writes benchmarks/results/<date>-<machine>-turns.jsonl.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from limpet.backend.config import EngineConfig
from limpet.backend.engine import Engine
from limpet.backend.offline import LocalEngine, new_sequence
from limpet.backend.sampling_params import SamplingParams
from limpet.benchmarks import result
from limpet.benchmarks.result import Result
from limpet.benchmarks.session_driver import SessionDriver, run
from limpet.benchmarks.workload import digest, uniform

ANSWER_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the subcommand."""
    options = _parse(arguments)
    config = EngineConfig(
        max_batch_size=1,
        enable_prefix_caching=False,
        load_format="dummy" if options.dummy else "auto",
        session_len=max(options.histories) + (options.turns + 1) * (options.turn_tokens + ANSWER_TOKENS) + 1,
    )
    with LocalEngine(options.model, config) as local:
        lines = [
            _line(options, local, history, whole)
            for history in track(options.histories, description="Measuring")
            for whole in (False, True)
        ]
    result.append(result.result_path(lines[0].machine, "turns"), lines)
    Console().print(_table(lines))
    return 0


def _table(lines: Sequence[Result]) -> Table:
    table = Table("history, tokens", "engine", "TTFT p50, ms", "TTFT max, ms", "cached tokens in the last turn")
    for each in lines:
        figures = (f"{each.ttft_ms_p50:.1f}", f"{each.ttft_ms_p99:.1f}", str(each.cached_tokens))
        table.add_row(str(each.in_tok), each.engine, *figures)
    return table


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="limpet-bench turns", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a converted model's folder")
    parser.add_argument("--histories", type=int, nargs="+", default=[512, 2048, 6144], help="tokens before the turns")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--turn-tokens", type=int, default=200, help="new tokens of a turn")
    parser.add_argument("--dummy", action="store_true", help="random weights of the model's shape")
    return parser.parse_args(arguments)


def _line(options: argparse.Namespace, local: LocalEngine, history: int, whole: bool) -> Result:
    """The median over the turns, the first of which is the warm-up."""
    engine, summary = local.engine, local.summary
    [opening] = uniform(engine.vocab_size, 1, history, 1)
    news = uniform(engine.vocab_size, options.turns + 1, options.turn_tokens, ANSWER_TOKENS)
    prompts = [request.prompt for request in news]
    ask = _ask_whole if whole else _ask_session
    measured = ask(engine, opening.prompt, prompts)[1:]
    ttfts = [ttft for ttft, _ in measured]
    on_gpu = summary.device.startswith("cuda")
    return Result(
        date=result.today(),
        commit=result.commit(),
        machine=torch.cuda.get_device_name() if on_gpu else result.cpu_machine(),
        gpu=torch.cuda.get_device_name() if on_gpu else "",
        torch=str(torch.__version__),
        engine="limpet, sent whole" if whole else "limpet, session",
        model=options.model.name,
        part="turns",
        dtype=summary.dtype,
        block_size=summary.block_size,
        threads=None if on_gpu else torch.get_num_threads(),
        digest=digest([opening, *news]),
        req=options.turns,
        in_tok=history,
        cached_tokens=measured[-1][1],
        runs=len(ttfts),
        ttft_ms_p50=statistics.median(ttfts) * 1000,
        ttft_ms_p99=max(ttfts) * 1000,
    )


def _ask_session(engine: Engine, opening: list[int], prompts: list[list[int]]) -> list[tuple[float, int]]:
    """(seconds to the first token, cached tokens) of each turn of one session."""
    driver = SessionDriver(engine, GREEDY)
    measured = [driver.ask("session", new) for new in (opening, *prompts)]
    driver.end("session")
    return measured[1:]


def _ask_whole(engine: Engine, opening: list[int], prompts: list[list[int]]) -> list[tuple[float, int]]:
    """The same for a client that sends the whole conversation with each turn."""
    history, measured = list(opening), []
    for number, new in enumerate(prompts):
        started = time.perf_counter()
        sequence = new_sequence(number, history + new, GREEDY, frozenset())
        engine.add(sequence)
        measured.append((run(engine, sequence, started), sequence.num_cached or 0))
        engine.discard(sequence)
        history = list(sequence.tokens)
    return measured


if __name__ == "__main__":
    main()
