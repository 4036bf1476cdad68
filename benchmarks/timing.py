"""From arrival times of tokens to the figures of a result."""

from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean, median

import msgspec
import numpy as np

from limpet.benchmarks.result import Result


@dataclass
class Answer:
    """One answered request: when it was sent, when its tokens came (seconds of one clock) and its last id."""

    sent_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # time, number of tokens
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    last_id: int = -1
    ended_s: float = 0.0  # of the load generator's answers
    error: str = ""  # why there is no answer

    @property
    def num_output_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0][0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first arrival."""
        after_first = self.num_output_tokens - self.arrivals[0][1]
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / after_first if after_first else None


@dataclass(frozen=True)
class Run:
    """All answers of one run of a workload, and how long it took."""

    answers: list[Answer]
    wall_s: float

    @property
    def out_tok_s(self) -> float:
        return sum(answer.num_output_tokens for answer in self.answers) / self.wall_s


def with_figures(result: Result, runs: list[Run]) -> Result:
    """Fill a result with the figures of the median run (by output tokens a second)."""
    run = sorted(runs, key=lambda run: run.out_tok_s)[len(runs) // 2]
    num_input = sum(answer.num_input_tokens for answer in run.answers)
    return msgspec.structs.replace(
        result,
        req=len(run.answers),
        in_tok=num_input,
        out_tok=sum(answer.num_output_tokens for answer in run.answers),
        cached_tokens=sum(answer.num_cached_tokens for answer in run.answers),
        distinct_last=len({answer.last_id for answer in run.answers}),
        runs=len(runs),
        wall_s=round(run.wall_s, 3),
        out_tok_s=round(run.out_tok_s, 2),
        in_tok_s=round(num_input / run.wall_s, 2),
        req_s=round(len(run.answers) / run.wall_s, 3),
        **_latencies(run.answers),
    )


def steady_step_ms(run: Run) -> float:
    """Milliseconds of a step while all requests decode: from the last one's first token to the first one's last."""
    start = max(answer.arrivals[0][0] for answer in run.answers)
    end = min(answer.arrivals[-1][0] for answer in run.answers)
    times = [time for time, _ in run.answers[0].arrivals if start <= time <= end]
    return 1e3 * (times[-1] - times[0]) / (len(times) - 1)


@dataclass(frozen=True)
class Latencies:
    """In seconds: of each answer its time to first token and time per output token, and all gaps between arrivals."""

    ttft: list[float]
    tpot: list[float]
    itl: list[float]

    @classmethod
    def of(cls, answers: list[Answer]) -> "Latencies":
        """An answer of one token has no time per token."""
        return cls(
            ttft=[answer.ttft_s for answer in answers],
            tpot=[tpot for answer in answers if (tpot := answer.tpot_s) is not None],
            itl=[later - earlier for answer in answers for (earlier, _), (later, _) in pairwise(answer.arrivals)],
        )


def _latencies(answers: list[Answer]) -> dict[str, float]:
    """In milliseconds; nothing for answers that came in one piece."""
    each = Latencies.of(answers)
    if not each.tpot:
        return {}
    return {
        "ttft_ms_p50": round(1e3 * median(each.ttft), 1),
        "ttft_ms_p99": round(1e3 * float(np.percentile(each.ttft, 99)), 1),
        "tpot_ms_mean": round(1e3 * mean(each.tpot), 2),
        "itl_ms_p99": round(1e3 * float(np.percentile(each.itl, 99)), 2),
    }
