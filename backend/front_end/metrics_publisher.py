"""The engines' metrics in Triton's own /metrics: limpet_admin asks once a second and passes on what has changed."""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import triton_python_backend_utils as pb_utils

from limpet.backend.link.messages import AdminReply, Failed
from limpet.backend.metrics import METRICS, HistogramState, MetricSpec, MetricsSnapshot

PERIOD_S = 1.0
_logger = logging.getLogger(__name__)


class MetricsPublisher:
    """A thread that keeps Triton's metrics up to date; `ask` returns each model's answer to op `metrics`."""

    def __init__(self, ask: Callable[[], Mapping[str, AdminReply | Failed]]) -> None:
        self._ask = ask
        self._specs = {spec.name: spec for spec in METRICS}
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        self._published: dict[tuple[str, str], float] = {}  # (model, series) -> counter value of the engine
        self._engines: dict[str, int] = {}  # model -> engine's pid: a new engine counts from 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="limpet-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            try:
                for model, answer in self._ask().items():
                    if isinstance(answer, AdminReply):
                        self.publish(model, msgspec.json.decode(answer.result, type=MetricsSnapshot))
            except Exception:
                _logger.exception("The metrics of this second are lost.")

    def publish(self, model: str, snapshot: MetricsSnapshot) -> None:
        """Bring Triton's values up to an engine's."""
        if self._engines.get(model) != snapshot.engine_pid:
            self._engines[model] = snapshot.engine_pid
            self._published = {key: value for key, value in self._published.items() if key[0] != model}
        for series, value in snapshot.values.items():
            name, label = _split(series)
            spec = self._specs[name]
            labels = {"model": model} | ({spec.label: label} if spec.label else {})
            self._set(spec, series, name, spec.kind, labels, value)
        for name, state in snapshot.histograms.items():
            self._publish_histogram(self._specs[name], model, state)

    def _publish_histogram(self, spec: MetricSpec, model: str, state: HistogramState) -> None:
        labels = {"model": model}
        for bound, count in zip([*state.bounds, float("inf")], state.counts, strict=True):
            text = "+Inf" if bound == float("inf") else f"{bound:g}"
            series = f"{spec.name}_bucket{{{text}}}"
            self._set(spec, series, f"{spec.name}_bucket", "counter", labels | {"le": text}, count)
        self._set(spec, f"{spec.name}_count", f"{spec.name}_count", "counter", labels, state.counts[-1])
        self._set(spec, f"{spec.name}_sum", f"{spec.name}_sum", "counter", labels, state.sum)

    def _set(self, spec: MetricSpec, series: str, name: str, kind: str, labels: dict[str, str], value: float) -> None:
        metric = self._metric(spec, name, kind, labels)
        before = self._published.get((labels["model"], series))
        if value == before:
            return
        if kind == "gauge":
            metric.set(value)
        else:
            metric.increment(value - (before or 0))
        self._published[labels["model"], series] = value

    def _metric(self, spec: MetricSpec, name: str, kind: str, labels: dict[str, str]) -> Any:
        key = (name, tuple(sorted(labels.items())))
        if key not in self._metrics:
            if name not in self._families:
                triton_kind = pb_utils.MetricFamily.GAUGE if kind == "gauge" else pb_utils.MetricFamily.COUNTER
                self._families[name] = pb_utils.MetricFamily(name=name, description=spec.description, kind=triton_kind)
            self._metrics[key] = self._families[name].Metric(labels=labels)
        return self._metrics[key]


def _split(series: str) -> tuple[str, str]:
    name, _, rest = series.partition("{")
    return name, rest.removesuffix("}")
