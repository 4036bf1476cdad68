"""Aliases through tritonserver: other shapes and types, one engine, and any of the models may come up first."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from limpet.client import Client
from limpet.converter.aliases import parse_aliases, write_alias
from tests.aids.chain import script
from tests.aids.live_server import LiveServer, live_server
from tests.aids.wire import post, text_of, wire

pytestmark = pytest.mark.server
ENGINE = "limpet.backend.engine_process"
# As TensorRT-LLM's clients send it.
ASKED: dict[str, Any] = {"max_tokens": 400, "top_k": 1, "beam_width": 1, "top_p": 0.0, "random_seed": 7}


@pytest.fixture(scope="module")
def repository(chain_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("aliases") / "repository"
    shutil.copytree(chain_repository, copy)
    for alias in parse_aliases(("trtllm", "trtllm-u32", "infer"), "chain"):
        write_alias(copy, alias, "chain")
    return copy


@pytest.fixture(scope="module")
def aliased(repository: Path) -> Iterator[LiveServer]:
    with live_server(repository) as server:
        server.wait_ready()
        yield server
        assert server.stop() == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("model", ["ensemble", "ensemble_u32"])
def test_batched_aliases_answer_tensorrt_llms_clients(aliased: LiveServer, model: str, stream: bool) -> None:
    with wire(aliased.target, model, batched=True, unsigned=model.endswith("u32")) as client:
        responses = client.ask(text_input="emoji", stop_words=["", "<never>"], stream=stream, **ASKED)
    assert text_of(responses) == script("emoji").text
    assert (len(responses) > 1) == stream


def test_batched_alias_answers_with_text_of_rank_one(aliased: LiveServer) -> None:
    """Clients iterate over it and decode every element."""
    text = triton.InferInput("text_input", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[b"hello"]], dtype=np.object_))
    results: list[Any] = []
    with triton.InferenceServerClient(aliased.target) as client:
        client.start_stream(lambda result, error: results.append(error or result))
        client.async_stream_infer("ensemble", [text])
        client.stop_stream()
    assert [result.as_numpy("text_output").shape for result in results] == [(1,)]


def test_infer_alias_gives_one_response_to_http_and_grpc_infer(aliased: LiveServer) -> None:
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hello"]}
    count = {"name": "max_tokens", "datatype": "INT32", "shape": [1], "data": [400]}
    status, body = post(aliased.http, "/v2/models/chain_infer/infer", {"inputs": [tensor, count]})
    assert status == 200, body
    assert json.loads(body)["outputs"][0] == {
        "name": "text_output",
        "datatype": "BYTES",
        "shape": [1],
        "data": [script("hello").text],
    }
    status, body = post(aliased.http, "/v2/models/chain_infer/generate", {"text_input": "hello", "stream": True})
    assert status == 400
    assert "one response" in body


def test_all_models_share_one_engine_and_the_client_finds_the_streaming_one(aliased: LiveServer) -> None:
    assert aliased.only(ENGINE)
    with Client(aliased.target) as client:
        assert client.models() == ["chain"]
        assert list(client.status()["models"]) == ["chain"]
        session = client.session()
        assert session.ask("hello", max_tokens=400).text == script("hello").text
        body = {"text_input": "emoji", "max_tokens": 400, "sequence_id": session.id}
        status, text = post(aliased.http, "/v2/models/ensemble/generate", body)
        assert (status, json.loads(text)["text_output"]) == (200, script("emoji").text)
        assert client.sessions()[0]["turns"] == 2


def test_tokenize_and_detokenize(aliased: LiveServer) -> None:
    with Client(aliased.target) as client:
        ids = client.tokenize("Größe 🦁")
        assert client.generate("Größe 🦁", max_tokens=1).num_input_tokens == len(ids)
        assert client.detokenize(ids) == "Größe 🦁"
        chat = [{"role": "user", "content": "hello"}]
        assert client.chat(chat, max_tokens=1).num_input_tokens == len(client.tokenize(messages=chat))


@pytest.mark.parametrize("first", ["ensemble", "ensemble_u32", "chain_infer"])
def test_an_alias_alone_starts_the_engine_that_the_others_then_use(repository: Path, first: str) -> None:
    flags = ["--model-control-mode=explicit", "--load-model=limpet_admin", f"--load-model={first}"]
    names = [first, *sorted({"chain", "ensemble", "ensemble_u32", "chain_infer"} - {first})]
    with live_server(repository, flags) as server:
        server.wait_ready()
        engine = server.only(ENGINE).pid
        for name in names:
            status, text = post(server.http, f"/v2/repository/models/{name}/load", {})
            assert status == 200, text
            status, text = post(server.http, f"/v2/models/{name}/generate", {"text_input": "hello", "max_tokens": 400})
            assert (status, json.loads(text)["text_output"]) == (200, script("hello").text)
        assert server.only(ENGINE).pid == engine
        assert server.stop() == 0
