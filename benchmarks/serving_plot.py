"""Pictures of serving measurements."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from limpet.benchmarks.timing import Latencies, Run


def draw(path: Path, measured: Sequence[tuple[float | None, str, Run]]) -> None:
    """Distributions of TTFT and ITL; where several rates were measured also throughput against rate. A PNG.

    `measured` are rate, label and answers of each measurement. matplotlib is imported here: only pictures need it.
    """
    from matplotlib.figure import Figure

    rates = [rate for rate, _, _ in measured if rate is not None]
    figure = Figure(figsize=(12 if rates else 8, 4), layout="constrained")
    axes = figure.subplots(1, 3 if rates else 2)
    for panel, name, title in zip(axes, ("ttft", "itl"), ("Time to first token", "Inter-token latency"), strict=False):
        for _, label, run in measured:
            milliseconds = np.sort(1e3 * np.asarray(getattr(Latencies.of(run.answers), name)))
            panel.plot(milliseconds, np.linspace(0, 1, len(milliseconds)), label=label)
        panel.set(title=title, xlabel="ms", ylabel="share of all that took at most so long", xscale="log")
        panel.grid(alpha=0.3)
    axes[0].legend()
    if rates:
        axes[2].plot(rates, [len(run.answers) / run.wall_s for _, _, run in measured], marker="o", label="answered")
        axes[2].plot(rates, rates, linestyle=":", label="sent")
        axes[2].set(title="Throughput against rate", xlabel="requests/s sent", ylabel="requests/s")
        axes[2].grid(alpha=0.3)
        axes[2].legend()
    figure.savefig(path, format="png", dpi=120)
