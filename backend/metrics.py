"""What the engine counts, added up per step and read once a second by limpet_admin, which hands it to Triton.

`METRICS` is the one list of names: limpet_admin registers them, docs/metrics.md documents them, a test compares both
with a scrape. A histogram appears as the three counters that Prometheus' histogram functions read (`_bucket` with label
`le`, `_sum`, `_count`): Triton's own histogram type takes one observation a call, too slow for every token.
"""

import bisect
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from limpet.backend.link.messages import ErrorCode

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class MetricSpec(msgspec.Struct, frozen=True):
    name: str
    kind: Kind
    description: str
    label: str | None = None  # beside `model`


METRICS = (
    MetricSpec("limpet_requests_running", "gauge", "Requests that hold a slot"),
    MetricSpec("limpet_requests_waiting", "gauge", "Requests that wait for a slot or for memory"),
    MetricSpec("limpet_slots", "gauge", "Slots of the persistent batch (max_batch_size)"),
    MetricSpec("limpet_cache_blocks", "gauge", "Cache blocks: used by requests, cached for later, or empty", "state"),
    MetricSpec("limpet_host_cache_blocks", "gauge", "Blocks of the cache's host tier: used or empty", "state"),
    MetricSpec("limpet_sessions", "gauge", "Interactive sessions"),
    MetricSpec("limpet_requests_total", "counter", "Requests that were accepted"),
    MetricSpec("limpet_tokens_in_total", "counter", "Prompt tokens of accepted requests, cached ones included"),
    MetricSpec("limpet_cached_tokens_total", "counter", "Prompt tokens that the cache served"),
    MetricSpec("limpet_tokens_out_total", "counter", "Generated tokens"),
    MetricSpec("limpet_evictions_total", "counter", "Cached blocks given up for others"),
    MetricSpec("limpet_blocks_offloaded_total", "counter", "Cached blocks copied to host memory"),
    MetricSpec("limpet_blocks_loaded_total", "counter", "Cached blocks loaded from host memory"),
    MetricSpec("limpet_preemptions_total", "counter", "Requests set back to waiting because memory ran out"),
    MetricSpec("limpet_steps_total", "counter", "Steps of the engine"),
    MetricSpec("limpet_errors_total", "counter", "Requests that ended with an error", "code"),
    MetricSpec("limpet_time_to_first_token_seconds", "histogram", "From a request's arrival to its first token"),
    MetricSpec("limpet_inter_token_latency_seconds", "histogram", "Between two tokens of one request"),
    MetricSpec("limpet_step_seconds", "histogram", "From a step's launch to its ids"),
)


class HistogramState(msgspec.Struct):
    """Cumulative counts by upper bound (the last one is +Inf), as Prometheus wants them."""

    bounds: list[float]
    counts: list[int]
    sum: float


class MetricsSnapshot(msgspec.Struct):
    """Values since the engine's start; a value with a label is keyed `name{label}`."""

    engine_pid: int
    values: dict[str, float]
    histograms: dict[str, HistogramState]


@dataclass
class Histogram:
    """Observations by upper bound."""

    bounds: tuple[float, ...] = _SECONDS
    total: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(_SECONDS) + 1))

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def state(self) -> HistogramState:
        cumulative, so_far = [], 0
        for count in self.counts:
            so_far += count
            cumulative.append(so_far)
        return HistogramState(list(self.bounds), cumulative, self.total)


@dataclass
class EngineMetrics:
    """What is counted as it happens; gauges are read from the engine when somebody asks."""

    num_requests: int = 0
    num_tokens_in: int = 0
    num_cached_tokens: int = 0
    num_tokens_out: int = 0
    errors: Counter[ErrorCode] = field(default_factory=Counter)
    time_to_first_token: Histogram = field(default_factory=Histogram)
    inter_token_latency: Histogram = field(default_factory=Histogram)
    step_time: Histogram = field(default_factory=Histogram)
