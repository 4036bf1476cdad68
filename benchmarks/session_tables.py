"""The section of docs/benchmarks.md on what sessions cost."""

from rich.box import MARKDOWN
from rich.table import Table

from limpet.benchmarks import result
from limpet.benchmarks.markdown_table import render
from limpet.benchmarks.result import RESULTS, Result

HEAD = """\
## What sessions cost

`make bench-sessions`, commit {commit}, {date}, torch {torch}, in process. A turn of 32 new tokens after a history,
its session's blocks being on the device, in host memory, or given up and computed again. A step while 8 requests
decode, beside idle sessions of 500 tokens. The wait of a turn's end for its commit (`session_store`).
"""


def session_sections() -> list[str]:
    """The newest figures of each machine and model, none if nothing was measured."""
    found = [each for path in sorted(RESULTS.glob("*-sessions.jsonl")) for each in result.read(path)]
    if not found:
        return []
    last = found[-1]
    head = HEAD.format(commit=last.commit, date=last.date, torch=last.torch)
    return ["\n".join((head, render(_tiers(found)), render(_idle(found)), render(_store(found))))]


def _newest(found: list[Result], part: str) -> list[Result]:
    of_part = [each for each in found if each.part == part]
    newest = {
        (each.machine, each.model, each.in_tok, each.engine, each.req, each.concurrency): each for each in of_part
    }
    return list(newest.values())


def _tiers(found: list[Result]) -> Table:
    table = Table("machine", "model", "history, tokens", "blocks", box=MARKDOWN)
    for column in ("cached tokens", "TTFT p50, ms", "TTFT max, ms"):
        table.add_column(column, justify="right")
    for each in _newest(found, "tiers"):
        figures = (f"{each.cached_tokens or 0:,}", f"{each.ttft_ms_p50:.1f}", f"{each.ttft_ms_p99:.1f}")
        tier = each.engine.removeprefix("limpet, ")
        table.add_row(each.machine, f"{each.model}, {each.dtype}", f"{each.in_tok:,}", tier, *figures)
    return table


def _idle(found: list[Result]) -> Table:
    table = Table("machine", "model", box=MARKDOWN)
    for column in ("idle sessions", "bytes a token", "ms a step"):
        table.add_column(column, justify="right")
    for each in _newest(found, "idle"):
        num_tokens = (each.req or 0) * (each.in_tok or 0)
        each_token = f"{(each.mem_gb or 0.0) * 1e9 / num_tokens:.1f}" if num_tokens else ""
        table.add_row(each.machine, f"{each.model}, {each.dtype}", f"{each.req:,}", each_token, f"{each.step_ms:.2f}")
    return table


def _store(found: list[Result]) -> Table:
    table = Table("machine", "history, tokens", "turns that end at once", box=MARKDOWN)
    for column in ("wait p50, ms", "wait p99, ms"):
        table.add_column(column, justify="right")
    for each in _newest(found, "store"):
        waits = (f"{each.settle_ms_p50:.2f}", f"{each.settle_ms_p99:.2f}")
        table.add_row(each.machine, f"{each.in_tok:,}", str(each.concurrency), *waits)
    return table
