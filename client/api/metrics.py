"""What the endpoint counts itself, and the engines' own counts, as Prometheus reads them."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ApiMetrics:
    """An ASGI middleware: requests by path and status, and how many are being answered."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._running = Gauge("limpet_api_requests_running", "Requests that are being answered", registry=registry)
        self._requests = Counter(
            "limpet_api_requests", "Requests by path and status", ("path", "status"), registry=registry
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499  # the client went away before the answer began

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._running.inc()
        try:
            await self._app(scope, receive, note_status)
        finally:
            self._running.dec()
            path = getattr(scope.get("route"), "path", "other")
            self._requests.labels(path, str(status)).inc()


def metrics_text(own: CollectorRegistry, engines: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Prometheus' text format; `engines` are op `metrics`' answers by model."""
    registry = CollectorRegistry()
    registry.register(_EngineMetrics(engines))
    text: bytes = generate_latest(own) + generate_latest(registry)
    return text


class _EngineMetrics(Collector):
    """The engines' counts under the names that Triton's metrics port shows."""

    def __init__(self, engines: Mapping[str, Mapping[str, Any]]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model, counts in self._engines.items():
            for series, value in counts["values"].items():
                name, _, label = series.removesuffix("}").partition("{")
                kind = "counter" if name.endswith("_total") else "gauge"
                family = _family(families, name.removesuffix("_total"), kind)
                second = {"code" if family.name == "limpet_errors" else "state": label} if label else {}
                family.add_sample(name, {"model": model} | second, value)
            for name, state in counts["histograms"].items():
                family = _family(families, name, "histogram")
                bounds = [*map(str, state["bounds"]), "+Inf"]
                for bound, count in zip(bounds, state["counts"], strict=True):
                    family.add_sample(f"{name}_bucket", {"model": model, "le": bound}, count)
                family.add_sample(f"{name}_count", {"model": model}, state["counts"][-1])
                family.add_sample(f"{name}_sum", {"model": model}, state["sum"])
        yield from families.values()


def _family(families: dict[str, Metric], name: str, kind: str) -> Metric:
    return families.setdefault(name, Metric(name, "See docs/metrics.md", kind))
