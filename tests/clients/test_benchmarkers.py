"""NVIDIA's benchmark commands against both styles of tensors."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.aids.live_server import LiveServer

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(1200)]
NUM_REQUESTS, NUM_TOKENS = 8, 10


@pytest.mark.parametrize(("model", "backend"), [("smollm2", "vllm"), ("ensemble", "tensorrtllm")])
def test_genai_perf(
    server: LiveServer, run: Callable[..., str], tokenizer_folder: Path, tmp_path: Path, model: str, backend: str
) -> None:
    run(
        *("genai-perf", "genai-perf", "profile", "-m", model, "--backend", backend, "--streaming"),
        *("--url", server.target, "--tokenizer", str(tokenizer_folder), "--artifact-dir", "artifacts"),
        *("--concurrency", "2", "--request-count", str(NUM_REQUESTS)),
        *("--synthetic-input-tokens-mean", "40", "--synthetic-input-tokens-stddev", "0"),
        *("--output-tokens-mean", str(NUM_TOKENS), "--output-tokens-stddev", "0", "--output-tokens-mean-deterministic"),
    )
    [report] = (tmp_path / "artifacts").rglob("*genai_perf.json")
    measured = json.loads(report.read_text())
    assert measured["request_count"]["avg"] == NUM_REQUESTS
    # Counted from the text: tokens of a word are not always those that the model wrote.
    assert NUM_TOKENS - 2 <= measured["output_sequence_length"]["avg"] <= NUM_TOKENS + 2
    assert measured["time_to_first_token"]["avg"] < measured["request_latency"]["avg"]


@pytest.mark.parametrize("model", ["smollm2", "ensemble"])
def test_perf_analyzer(server: LiveServer, run: Callable[..., str], tmp_path: Path, model: str) -> None:
    asked = {
        "text_input": ["The capital of France is"],
        "stream": [True],
        "max_tokens": [NUM_TOKENS],
        "ignore_eos": [True],
    }
    (tmp_path / "input.json").write_text(json.dumps({"data": [asked]}))
    run(
        *("genai-perf", "perf_analyzer", "-m", model, "--async", "-i", "grpc", "--streaming"),
        *("--service-kind", "triton", "-u", server.target, "--input-data", "input.json", "--concurrency-range", "2"),
        *("--request-count", str(NUM_REQUESTS), "--stability-percentage", "999", "--profile-export-file", "out.json"),
    )
    [experiment] = json.loads((tmp_path / "out.json").read_text())["experiments"]
    assert len(experiment["requests"]) >= NUM_REQUESTS
    assert all(1 < len(request["response_timestamps"]) <= NUM_TOKENS for request in experiment["requests"])
