"""Triton's /metrics shows what the engine counts, under the documented names."""

import re
import time
import urllib.request
from pathlib import Path

import pytest

from limpet.backend.metrics import METRICS
from tests.aids.live_server import LiveServer
from tests.aids.wire import wire

pytestmark = pytest.mark.server
ROOT = Path(__file__).parents[2]
PUBLISHED_WITHIN_S = 20.0


def _scrape(server: LiveServer) -> dict[str, float]:
    """Value of every series of Limpet's."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("limpet_")}


def _await(server: LiveServer, series: str, value: float) -> dict[str, float]:
    deadline = time.monotonic() + PUBLISHED_WITHIN_S
    while (scraped := _scrape(server)).get(series) != value:
        assert time.monotonic() < deadline, f"{series} is {scraped.get(series)}, not {value}"
        time.sleep(0.2)
    return scraped


def test_counts_of_requests_tokens_and_errors_arrive(chain: LiveServer) -> None:
    before = _await(chain, 'limpet_requests_running{model="chain"}', 0)
    with wire(chain.target, "chain") as client:
        answer = client.ask(text_input="emoji", max_tokens=5, temperature=0.0, ignore_eos=True, return_output_ids=True)
        refusal = client.ask(text_input="emoji", max_tokens=5, temperature=-1.0)
    assert sum(len(response.outputs["output_ids"]) for response in answer) == 5
    assert refusal[-1].error is not None
    model = '{model="chain"}'
    refused = 'limpet_errors_total{code="INVALID_ARG",model="chain"}'
    tokens = f"limpet_tokens_out_total{model}"
    after = _await(chain, refused, before.get(refused, 0) + 1)
    assert after[tokens] == before.get(tokens, 0) + 5
    for histogram, num_observations in (
        ("limpet_time_to_first_token_seconds", 1),
        ("limpet_inter_token_latency_seconds", 4),
    ):
        count, everything = f"{histogram}_count{model}", f'{histogram}_bucket{{le="+Inf",model="chain"}}'
        assert after[count] == before.get(count, 0) + num_observations
        assert after[everything] == after[count]


def test_documented_registered_and_scraped_names_are_the_same(chain: LiveServer) -> None:
    scraped = _await(chain, 'limpet_requests_running{model="chain"}', 0)
    names = {re.sub(r"_(bucket|sum|count)$", "", series.split("{")[0]) for series in scraped}
    documented = set(re.findall(r"^\| `(limpet_\w+)`", (ROOT / "docs" / "metrics.md").read_text("utf-8"), re.M))
    assert names == {spec.name for spec in METRICS} == documented


def test_evictions_and_preemptions_of_a_short_memory_arrive(tiny: LiveServer) -> None:
    """Twelve answers that need seven blocks each, of 36."""
    model = '{model="tiny"}'
    names = (f"limpet_preemptions_total{model}", f"limpet_evictions_total{model}")
    before = _await(tiny, f"limpet_requests_running{model}", 0)
    with wire(tiny.target, "tiny") as client:
        for number in range(12):
            prompt = [number + 4] * 20
            client.send(input_ids=prompt, max_tokens=90, ignore_eos=True, temperature=0.0, request_id=str(number))
        assert not [response.error for response in (client.next() for _ in range(12)) if response.error]
    deadline = time.monotonic() + PUBLISHED_WITHIN_S
    while not all((after := _scrape(tiny)).get(name, 0) > before.get(name, 0) for name in names):
        assert time.monotonic() < deadline, [after.get(name) for name in names]
        time.sleep(0.2)
