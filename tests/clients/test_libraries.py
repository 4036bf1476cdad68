"""Client libraries that others wrote, unmodified: the answers are those of our own client."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.aids.live_server import LiveServer

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(1200)]
PROMPT = "The capital of France is"
Expected = Callable[[str, int], str]


def test_litellm(server: LiveServer, run_program: Callable[..., Any], expected: Expected) -> None:
    answers = run_program("litellm", server.http, PROMPT)
    wanted = expected(PROMPT, 12)
    assert answers["generate"] == wanted
    assert answers["max_completion_tokens"] == expected(PROMPT, 3)
    assert "".join(text for text in answers["stream"] if text) == wanted
    assert sum(bool(text) for text in answers["stream"]) > 2
    assert answers["infer"] == wanted
    assert "temprature" in answers["refusal"]


def test_llama_index(server: LiveServer, run_program: Callable[..., Any], expected: Expected) -> None:
    answers = run_program("llama-index", server.target, PROMPT)
    assert answers["complete"] == expected(PROMPT, 11), "it asks for 12 tokens and throws the last one away"
    assert "".join(answers["stream"]) == expected(PROMPT, 11)
    assert len(answers["stream"]) > 2
    assert answers["chat"] == expected(f"user: {PROMPT}\nassistant: ", 11), "it sends messages as one text"
    assert "yes" in answers["ends_early"].lower()


def test_plain_tritonclient(server: LiveServer, run_program: Callable[..., Any], expected: Expected) -> None:
    answers = run_program("tritonclient", server.target, server.http.removeprefix("http://"), PROMPT)
    wanted = expected(PROMPT, 12)
    assert "".join(answers["vllm"]) == wanted
    assert len(answers["vllm"]) > 2
    assert [answers[name] for name in ("ensemble", "ensemble_u32", "infer")] == [wanted] * 3
