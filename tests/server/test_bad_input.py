"""Wrong requests through tritonserver: one sentence each, only for themselves, and the server goes on."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.aids.chain import script
from tests.aids.live_server import LiveServer
from tests.aids.wire import Wire, post, text_of, wire

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def client(chain: LiveServer) -> Iterator[Wire]:
    with wire(chain.target, "chain") as connection:
        yield connection


def _assert_sentence(error: str | None, *words: str) -> None:
    assert error is not None
    for word in words:
        assert word in error
    for leak in ("Traceback", 'File "', ".py", "/"):
        assert leak not in error, error


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"text_input": ""}, ["text_input"]),
        ({}, ["text_input", "messages", "input_ids"]),
        ({"input_ids": []}, ["input_ids"]),
        ({"input_ids": [5, 10_000_000]}, ["10000000"]),
        ({"input_ids": [5, -1]}, ["-1"]),
        ({"text_input": "hello", "input_ids": [5]}, ["text_input", "input_ids"]),
        ({"text_input": "hello", "max_tokens": 0}, ["max_tokens"]),
        ({"text_input": "hello", "max_tokens": -1}, ["max_tokens"]),
        ({"text_input": "hello", "temperature": -1.0}, ["temperature"]),
        ({"text_input": "hello", "temperature": float("nan")}, ["temperature"]),
        ({"text_input": "hello", "temperature": float("inf")}, ["temperature"]),
        ({"text_input": "hello", "top_p": 2.0}, ["top_p"]),
        ({"text_input": "hello", "top_k": -7}, ["top_k"]),
        ({"text_input": "hello", "sampling_parameters": "{"}, ["sampling_parameters", "JSON"]),
        ({"text_input": "hello", "sampling_parameters": "[1]"}, ["sampling_parameters"]),
        ({"text_input": "hello", "sampling_parameters": '{"temprature": 1}'}, ["temprature", "temperature"]),
        ({"text_input": "hello", "sampling_parameters": '{"max_tokens": "many"}'}, ["max_tokens"]),
        ({"text_input": "hello", "sampling_parameters": '{"n": 2}'}, ["n is 2"]),
        ({"messages": "no json"}, ["messages", "JSON"]),
        ({"messages": "[]"}, ["messages"]),
        ({"messages": '[{"role": "user"}]'}, ["role", "content"]),
        ({"text_input": b"\xff\xfe broken"}, ["text_input", "UTF-8"]),
        ({"sampling_parameters": b"\xff", "text_input": "hello"}, ["sampling_parameters", "UTF-8"]),
    ],
    ids=repr,
)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_wrong_request_gets_one_sentence(client: Wire, values: dict[str, Any], words: list[str], stream: bool) -> None:
    responses = client.ask(stream=stream, **values)
    assert len(responses) == 1
    _assert_sentence(responses[0].error, *words)
    assert text_of(client.ask(text_input="hello", max_tokens=100, stream=True)) == script("hello").text


@pytest.mark.parametrize("parameters", [{"temprature": 1}, {"max_tokens": "many"}, {"beam_width": 4}], ids=repr)
def test_wrong_request_parameter_gets_one_sentence(client: Wire, parameters: dict[str, Any]) -> None:
    responses = client.ask(parameters, text_input="hello", stream=True)
    assert len(responses) == 1
    _assert_sentence(responses[0].error, next(iter(parameters)))


def test_more_tokens_than_the_context_are_clamped(client: Wire) -> None:
    responses = client.ask(text_input="hello", max_tokens=10**9, stream=True, return_finish_reason=True)
    assert text_of(responses) == script("hello").text
    assert responses[-1].outputs["finish_reason"] == [b"stop"]


def test_prompt_beyond_the_context_says_both_lengths(client: Wire, chain: LiveServer) -> None:
    responses = client.ask(input_ids=[5] * 1_000_000, stream=True)
    assert len(responses) == 1
    _assert_sentence(responses[0].error, "1000000", "session_len")


def test_two_megabytes_of_text_are_refused(client: Wire) -> None:
    responses = client.ask(text_input="limpet " * 300_000, stream=True)
    assert len(responses) == 1
    _assert_sentence(responses[0].error, "session_len")


def test_session_id_of_129_characters_is_refused_over_grpc(client: Wire) -> None:
    responses = client.ask(text_input="hello", stream=True, sequence_id="x" * 129, sequence_start=True)
    assert len(responses) == 1
    _assert_sentence(responses[0].error, "128")


def test_session_id_of_129_characters_is_refused_over_http(chain: LiveServer) -> None:
    body = {"text_input": "hello", "sequence_id": "x" * 129, "sequence_start": True}
    status, text = post(chain.http, "/v2/models/chain/generate", body)
    assert status == 400
    _assert_sentence(text, "128")


def test_wrong_request_disturbs_nobody_else(client: Wire, chain: LiveServer) -> None:
    with wire(chain.target, "chain") as other:
        other.send(text_input="long", max_tokens=20_000, stream=True)
        first = other.next()
        for _ in range(20):
            _assert_sentence(client.ask(text_input="", stream=True)[-1].error)
        assert text_of([first, *other.rest()]) == script("long").text
