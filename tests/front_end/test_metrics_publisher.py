"""limpet_admin turns an engine's counts since its start into Triton's ever-growing counters."""

from limpet.backend.front_end.metrics_publisher import MetricsPublisher
from limpet.backend.metrics import Histogram, MetricsSnapshot
from tests.front_end.fake_triton import MetricFamily


def _value(name: str, **labels: str) -> float:
    return next(metric.value for metric in MetricFamily.all[name].metrics if metric.labels == labels)


def test_counters_go_on_when_an_engine_is_restarted_and_gauges_follow() -> None:
    publisher = MetricsPublisher(dict)
    try:
        for pid, tokens, running in ((1, 10, 2), (1, 15, 3), (2, 4, 0)):
            values = {"limpet_tokens_out_total": tokens, "limpet_requests_running": running}
            publisher.publish("m", MetricsSnapshot(pid, values, {}))
    finally:
        publisher.stop()
    assert _value("limpet_tokens_out_total", model="m") == 19
    assert _value("limpet_requests_running", model="m") == 0


def test_labels_and_histograms_become_series() -> None:
    histogram = Histogram()
    for seconds in (0.0005, 0.003, 1000.0):
        histogram.observe(seconds)
    publisher = MetricsPublisher(dict)
    try:
        publisher.publish(
            "h", MetricsSnapshot(1, {"limpet_errors_total{INTERNAL}": 2}, {"limpet_step_seconds": histogram.state()})
        )
    finally:
        publisher.stop()
    assert _value("limpet_errors_total", model="h", code="INTERNAL") == 2
    assert _value("limpet_step_seconds_bucket", model="h", le="0.001") == 1
    assert _value("limpet_step_seconds_bucket", model="h", le="0.005") == 2
    assert _value("limpet_step_seconds_bucket", model="h", le="+Inf") == 3
    assert _value("limpet_step_seconds_count", model="h") == 3
    assert _value("limpet_step_seconds_sum", model="h") == 1000.0035
