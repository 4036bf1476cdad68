"""The table that users of the field's serving benchmarks know."""

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from limpet.benchmarks.timing import Latencies, Run

_LATENCIES = (
    ("Time to First Token", "TTFT", "ttft"),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot"),
    ("Inter-token Latency", "ITL", "itl"),
)


def serving_table(run: Run, num_failed: int, title: str) -> Table:
    """Counts, throughput and latencies of the answers that came."""
    table = Table("Serving Benchmark Result", title, box=SIMPLE)
    table.columns[1].justify = "right"
    num_input = sum(answer.num_input_tokens for answer in run.answers)
    num_cached = sum(answer.num_cached_tokens for answer in run.answers)
    num_output = sum(answer.num_output_tokens for answer in run.answers)
    rows: list[tuple[str, float, str]] = [
        ("Successful requests", len(run.answers), "d"),
        ("Failed requests", num_failed, "d"),
        ("Benchmark duration (s)", run.wall_s, ".2f"),
        ("Total input tokens", num_input, "d"),
        ("Of them from the prefix cache", num_cached, "d"),
        ("Total generated tokens", num_output, "d"),
        ("Request throughput (req/s)", len(run.answers) / run.wall_s, ".2f"),
        ("Input token throughput (tok/s)", num_input / run.wall_s, ".2f"),
        ("Output token throughput (tok/s)", run.out_tok_s, ".2f"),
    ]
    for name, value, form in rows:
        table.add_row(name, format(value, form))
    each = Latencies.of(run.answers)
    for heading, short, name in _LATENCIES:
        if seconds := getattr(each, name):
            table.add_section()
            table.add_row(heading, "", style="bold")
            for statistic, value in _statistics(seconds).items():
                table.add_row(f"{statistic} {short} (ms)", f"{1e3 * value:.2f}")
    return table


def _statistics(seconds: list[float]) -> dict[str, float]:
    return {
        "Mean": float(np.mean(seconds)),
        "Median": float(np.median(seconds)),
        "P99": float(np.percentile(seconds, 99)),
    }
