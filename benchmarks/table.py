"""docs/benchmarks.md from the newest result files: `python -m benchmarks.table`."""

from pathlib import Path

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from limpet.benchmarks import result
from limpet.benchmarks.aiperf_table import aiperf_sections
from limpet.benchmarks.gpu_table import gpu_sections
from limpet.benchmarks.markdown_table import render
from limpet.benchmarks.result import RESULTS, Result
from limpet.benchmarks.session_tables import session_sections

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
HEAD = """\
# Benchmarks

Written by `make bench-table` from `benchmarks/results/`, one line of JSON for each figure; do not edit. Every figure
is the median of at least three runs after a warm-up, greedy, end ids ignored, prefix caching off. Results are
comparable only if the digests of their requests are equal (`benchmarks/workload.py`).
"""
CPU_HEAD = """\
## SmolLM2-135M in float32 on a CPU

`make bench-cpu` on {machine}, {threads} threads, torch {torch}, commit {commit}, {date}. {req} requests of
{prompt} prompt tokens and {answer} answer tokens each, digest `{digest}`. The contenders took turns in one run on one
machine, each with its model in a process of its own: compare the ratios, not the absolute numbers. transformers
answers one request after the other (sdpa attention, its cache on).
"""
TURNS_HEAD = """\
## Turns of a session

`make bench-turns`, commit {commit}, {date}: {turns} turns of 200 new tokens after a history, in process. A session's
turn computes its new tokens; the same conversation sent whole computes all of them.
"""

OPTIONS_HEAD = """\
## What options cost

`make bench-options`, commit {commit}, {date}, torch {torch}: a step while {req} requests decode, in process; one of
them or all have the option. The cases took turns in one run.
"""


def write_page() -> None:
    """Render the page, and print its tables."""
    sections = [HEAD]
    if cpu := _newest("cpu"):
        sections.append(_cpu_section(cpu))
    sections += aiperf_sections()
    if turns := _last("turns"):
        sections.append(_turns_section(turns))
    sections += session_sections()
    if options := _last("options"):
        sections.append(_options_section(options))
    sections += gpu_sections()
    PAGE.write_text("\n".join(sections), "utf-8")
    Console().print("\n".join(sections), markup=False, highlight=False, soft_wrap=True)


def _newest(what: str) -> list[Result]:
    """Results of the last run of that benchmark, none if it was never run."""
    files = sorted(RESULTS.glob(f"*-{what}.jsonl"))
    results = result.read(files[-1]) if files else []
    last_run = max((index for index, each in enumerate(results) if each.part == "convert"), default=0)
    return results[last_run:]


def _last(what: str) -> list[Result]:
    """The newest result of each history and contender over the files of that benchmark."""
    found = [each for path in sorted(RESULTS.glob(f"*-{what}.jsonl")) for each in result.read(path)]
    newest = {(each.machine, each.model, each.in_tok, each.engine): each for each in found}
    return sorted(newest.values(), key=lambda each: (each.machine, each.model, each.in_tok or 0, each.engine))


def _turns_section(turns: list[Result]) -> str:
    table = Table("machine", "model", "history, tokens", "engine", box=MARKDOWN)
    for column in ("cached tokens in the last turn", "TTFT p50, ms", "TTFT max, ms"):
        table.add_column(column, justify="right")
    for each in turns:
        figures = (str(each.cached_tokens or 0), _number(each.ttft_ms_p50), _number(each.ttft_ms_p99))
        table.add_row(each.machine, f"{each.model}, {each.dtype}", f"{each.in_tok:,}", each.engine, *figures)
    first = turns[0]
    return TURNS_HEAD.format(turns=first.req, commit=first.commit, date=first.date) + "\n" + render(table)


def _options_section(options: list[Result]) -> str:
    """Ratios within one run: that of the newest plain figure of each machine and model."""
    plain = {(each.machine, each.model): each for each in options if each.engine.endswith("all plain")}
    table = Table("machine", "model", "requests", box=MARKDOWN)
    for column in ("ms a step", "× all plain"):
        table.add_column(column, justify="right")
    for each in options:
        ratio = (each.step_ms or 0.0) / (plain[each.machine, each.model].step_ms or 1.0)
        name = each.engine.removeprefix("limpet, ")
        table.add_row(each.machine, f"{each.model}, {each.dtype}", name, _number(each.step_ms), f"{ratio:.2f}")
    first = options[0]
    head = OPTIONS_HEAD.format(commit=first.commit, date=first.date, torch=first.torch, req=first.req)
    return head + "\n" + render(table)


def _cpu_section(results: list[Result]) -> str:
    speeds = [each for each in results if each.part == "fixed"]
    peer = next(each for each in speeds if each.engine != "limpet")
    head = CPU_HEAD.format(
        machine=peer.machine,
        threads=peer.threads,
        torch=peer.torch,
        commit=peer.commit,
        date=peer.date,
        req=peer.req,
        prompt=(peer.in_tok or 0) // (peer.req or 1),
        answer=(peer.out_tok or 0) // (peer.req or 1),
        digest=peer.digest,
    )
    return "\n".join((head, render(_speed_table(speeds, peer)), render(_cost_table(results))))


def _speed_table(speeds: list[Result], peer: Result) -> Table:
    table = Table("engine", "via", box=MARKDOWN)
    for column in ("streams", "output tokens/s", "× transformers", "TTFT p50, ms", "time per token, ms", "ITL p99, ms"):
        table.add_column(column, justify="right")
    for each in speeds:
        ratio = (each.out_tok_s or 0.0) / (peer.out_tok_s or 1.0)
        latencies = (_number(value) for value in (each.ttft_ms_p50, each.tpot_ms_mean, each.itl_ms_p99))
        name = each.engine if each is peer else f"{each.engine}, blocks of {each.block_size}"
        table.add_row(name, each.via, str(each.concurrency), _number(each.out_tok_s), f"{ratio:.2f}", *latencies)
    return table


def _cost_table(results: list[Result]) -> Table:
    table = Table("what", box=MARKDOWN)
    for column in ("seconds", "peak memory, GB"):
        table.add_column(column, justify="right")
    labels = {
        ("convert", "engine"): "conversion of the GGUF file (limpet-convert)",
        ("start", "grpc"): "limpet-serve: start to ready",
        ("memory", "grpc"): "limpet-serve: all its processes, sum of their peaks",
        ("memory", "engine"): "limpet-serve: the engine process alone",
    }
    for each in results:
        if label := labels.get((each.part, each.via)):
            table.add_row(label, _number(each.wall_s), _number(each.mem_gb))
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}" if value >= 10 else f"{value:.2f}"


if __name__ == "__main__":
    write_page()
