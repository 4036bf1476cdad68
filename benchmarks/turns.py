"""limpet-bench turns: time to the first token of a session's turns, beside the same conversation sent whole each time.

    limpet-bench turns workspace/model_repository/smollm2 --histories 512 2048 6144     # in this process
    limpet-bench turns 127.0.0.1:33337 --histories 512 2048                             # a running server, gRPC

A session begins with a history; then come turns of so many new tokens each. Greedy, no prefix of another request is
reused: what a turn reuses is its session's own. Adds lines of JSON to --output.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from limpet.benchmarks import result
from limpet.benchmarks.arguments import count, new_file
from limpet.benchmarks.result import Result
from limpet.benchmarks.turns_served import ServedTurns
from limpet.benchmarks.workload import digest, uniform
from limpet.client import LimpetError

ANSWER_TOKENS = 8


class Turns(Protocol):
    """Asks one model; an answer is (seconds to its first token, cached tokens)."""

    vocab_size: int

    def in_session(self, prompts: list[list[int]]) -> list[tuple[float, int]]:
        """The turns of one session."""
        ...

    def whole(self, prompts: list[list[int]]) -> list[tuple[float, int]]:
        """The same for a client that sends the whole conversation with each turn."""
        ...

    def described(self, base: Result) -> Result:
        """The result with what is known of model and machine."""
        ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the subcommand."""
    options = _parse(arguments)
    try:
        with _turns(options) as turns:
            lines = [
                _line(options, turns, history, whole)
                for history in track(options.histories, description="Measuring")
                for whole in (False, True)
            ]
    except LimpetError as error:
        print(f"limpet-bench turns: {error}", file=sys.stderr)
        return 1
    what = "turns" if lines[0].via == "engine" else "turns-served"
    result.append(options.output or result.result_path(lines[0].machine, what), lines)
    Console().print(_table(lines))
    return 0


def _turns(options: argparse.Namespace) -> AbstractContextManager[Turns]:
    if not Path(options.target).is_dir():
        return ServedTurns(options.target, options.model, ANSWER_TOKENS)
    # Imported here: a server is measured without torch.
    from limpet.backend.checkpoint import CheckpointError
    from limpet.backend.config import ConfigError
    from limpet.benchmarks.turns_in_process import TurnsInProcess

    session_len = max(options.histories) + (options.turns + 1) * (options.turn_tokens + ANSWER_TOKENS) + 1
    try:
        return TurnsInProcess(Path(options.target), session_len, ANSWER_TOKENS, random_weights=options.dummy)
    except (CheckpointError, ConfigError) as error:
        raise SystemExit(f"limpet-bench turns: {error}") from None


def _line(options: argparse.Namespace, turns: Turns, history: int, whole: bool) -> Result:
    """The median over the turns after the history, the first of which is the warm-up."""
    [opening] = uniform(turns.vocab_size, 1, history, 1)
    news = uniform(turns.vocab_size, options.turns + 1, options.turn_tokens, ANSWER_TOKENS)
    first, *others = (request.prompt for request in news)
    if whole:
        measured = turns.whole([opening.prompt + first, *others])[1:]
    else:
        measured = turns.in_session([opening.prompt, first, *others])[2:]
    ttfts = [ttft for ttft, _ in measured]
    base = Result(
        date=result.today(),
        commit=result.commit(),
        machine=result.cpu_machine(),
        torch="",
        engine="limpet, sent whole" if whole else "limpet, session",
        model="",
        part="turns",
    )
    return msgspec.structs.replace(
        turns.described(base),
        digest=digest([opening, *news]),
        req=options.turns,
        in_tok=history,
        cached_tokens=measured[-1][1],
        runs=len(ttfts),
        ttft_ms_p50=round(statistics.median(ttfts) * 1000, 2),
        ttft_ms_p99=round(max(ttfts) * 1000, 2),
    )


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
    parser.add_argument("target", metavar="TARGET", help="a converted model's folder, or HOST:PORT (gRPC)")
    parser.add_argument("--model", help="of a server that has several")
    parser.add_argument("--histories", type=count, nargs="+", default=[512, 2048, 6144], help="tokens before the turns")
    parser.add_argument("--turns", type=count, default=5)
    parser.add_argument("--turn-tokens", type=count, default=200, help="new tokens of a turn")
    parser.add_argument("--dummy", action="store_true", help="random weights of the folder's shape")
    parser.add_argument(
        "--output", type=new_file, metavar="FILE", help="JSON lines (default: benchmarks/results/, or here)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
