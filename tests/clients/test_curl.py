"""curl, as the documentation of Triton's generate extension shows it."""

import json
import subprocess
from collections.abc import Callable

import pytest

from tests.aids.live_server import LiveServer

pytestmark = [pytest.mark.server, pytest.mark.long]
PROMPT = "The capital of France is"
Expected = Callable[[str, int], str]


def curl(server: LiveServer, path: str, body: str) -> str:
    command = ["curl", "-s", "--max-time", "60", "-X", "POST", f"{server.http}/v2/models/{path}", "-d", body]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=90).stdout


@pytest.mark.parametrize("model", ["smollm2", "ensemble", "ensemble_u32", "smollm2_infer"])
def test_generate(server: LiveServer, expected: Expected, model: str) -> None:
    body = {"text_input": PROMPT, "parameters": {"stream": False, "temperature": 0, "max_tokens": 12}}
    assert json.loads(curl(server, f"{model}/generate", json.dumps(body)))["text_output"] == expected(PROMPT, 12)


@pytest.mark.parametrize("model", ["smollm2", "ensemble", "ensemble_u32"])
def test_generate_stream(server: LiveServer, expected: Expected, model: str) -> None:
    body = {"text_input": PROMPT, "parameters": {"stream": True, "temperature": 0, "max_tokens": 12}}
    events = [line for line in curl(server, f"{model}/generate_stream", json.dumps(body)).splitlines() if line]
    texts = [json.loads(event.removeprefix("data: "))["text_output"] for event in events]
    assert "".join(texts) == expected(PROMPT, 12)
    assert len(texts) > 2


def test_tensorrt_llm_benchmark_scripts(server: LiveServer) -> None:
    """What SGLang's and older vLLM's benchmark scripts post to a TensorRT-LLM server."""
    body = {"accumulate_tokens": True, "text_input": PROMPT, "temperature": 0.000001, "top_p": 1.0, "max_tokens": 20}
    body |= {"stream": True, "min_length": 20, "end_id": 1048576, "return_num_output_tokens": True}
    events = [line for line in curl(server, "ensemble/generate_stream", json.dumps(body)).splitlines() if line]
    counts = [json.loads(event.removeprefix("data: "))["num_output_tokens"] for event in events]
    assert sum(counts) == 20


def test_an_error_is_json_with_our_sentence(server: LiveServer) -> None:
    answer = json.loads(curl(server, "smollm2/generate", json.dumps({"text_input": PROMPT, "temprature": 1})))
    assert "temprature" in answer["error"]
