"""The section of docs/benchmarks.md with limpet-bench's figures beside AIPerf's."""

from rich.box import MARKDOWN
from rich.table import Table

from limpet.benchmarks import result
from limpet.benchmarks.markdown_table import render
from limpet.benchmarks.result import RESULTS, Result

HEAD = """\
## limpet-bench beside AIPerf

`make bench-aiperf`, commit {commit}, {date}, {machine}: both measured the same limpet-api with
{model}, {req} requests of {tokens} answer tokens, {concurrency} in flight, in turns; medians of {runs} runs. AIPerf
counts tokens in the answers' text, and calls time per output token inter-token latency.
"""


def aiperf_sections() -> list[str]:
    """The section, if it was ever measured; from the newest lines."""
    found = [each for path in sorted(RESULTS.glob("*-aiperf.jsonl")) for each in result.read(path)]
    newest = {each.engine: each for each in found}
    if len(newest) < 2:
        return []
    ours = newest["limpet-bench"]
    head = HEAD.format(
        commit=ours.commit,
        date=ours.date,
        machine=ours.machine,
        model=ours.model,
        req=ours.req,
        tokens=(ours.out_tok or 0) // (ours.req or 1),
        concurrency=ours.concurrency,
        runs=ours.runs,
    )
    table = Table("measured by", box=MARKDOWN)
    for column in ("requests/s", "output tokens/s", "TTFT p50, ms", "TTFT p99, ms", "time per output token, ms"):
        table.add_column(column, justify="right")
    for each in newest.values():
        table.add_row(each.engine, *_figures(each))
    return [f"{head}\n{render(table)}"]


def _figures(each: Result) -> list[str]:
    values = (each.req_s, each.out_tok_s, each.ttft_ms_p50, each.ttft_ms_p99, each.tpot_ms_mean)
    return ["" if value is None else f"{value:,.2f}" for value in values]
