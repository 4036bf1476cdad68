"""The paths beside the answers: models, health, metrics."""

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from tests.client.fake_server import FakeServer

COUNTS = {
    "engine_pid": 1,
    "values": {"limpet_requests_running": 2, "limpet_tokens_out_total": 5, "limpet_errors_total{INTERNAL}": 1},
    "histograms": {"limpet_step_seconds": {"bounds": [0.1, 1.0], "counts": [1, 2, 3], "sum": 4.5}},
}


def test_models_with_their_longest_context(server: FakeServer, ask: openai.OpenAI) -> None:
    server.admin = lambda operation: {"models": {"tiny": {"ready": True, "engine": {"session_len": 512}}}}
    [model] = ask.models.list().data
    assert (model.id, model.object, model.max_model_len) == ("tiny", "model", 512)  # type: ignore[attr-defined]
    assert ask.models.retrieve("tiny").id == "tiny"


def test_health_says_why_it_is_bad(server: FakeServer, url: str) -> None:
    server.admin = lambda operation: {"ready": True}
    assert httpx.get(f"{url}/health").status_code == 200
    server.admin = lambda operation: {"ready": False, "reason": "The engine is starting."}
    response = httpx.get(f"{url}/health")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "The engine is starting."


def test_metrics_show_the_engines_and_the_endpoints_counts(server: FakeServer, url: str) -> None:
    server.admin = lambda operation: COUNTS if operation["op"] == "metrics" else {}
    httpx.get(f"{url}/v1/models")
    text = httpx.get(f"{url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["limpet_tokens_out"].type == "counter"
    [sample] = families["limpet_errors"].samples
    assert (sample.labels, sample.value) == ({"model": "tiny", "code": "INTERNAL"}, 1)
    buckets = [(s.labels["le"], s.value) for s in families["limpet_step_seconds"].samples if s.name.endswith("_bucket")]
    assert buckets == [("0.1", 1), ("1.0", 2), ("+Inf", 3)]
    requests = {(s.labels["path"], s.labels["status"]): s.value for s in families["limpet_api_requests"].samples}
    assert requests["/v1/models", "200"] >= 1
    [running] = families["limpet_api_requests_running"].samples
    assert running.value == 1  # this very request
