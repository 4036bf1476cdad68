"""SmolLM2 through tritonserver: its ids are transformers', and every way to ask gives the same answer."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.aids.ids_equal import assert_ids_equal
from tests.aids.live_server import LiveServer
from tests.aids.reference import ReferencePrompt, smollm2_references
from tests.aids.wire import post, text_of, wire

pytestmark = pytest.mark.server
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 7}


def _greedy_ids(server: LiveServer, prompt: list[int], num_tokens: int) -> list[int]:
    with wire(server.target, "smollm2") as client:
        responses = client.ask(
            input_ids=prompt,
            max_tokens=num_tokens,
            temperature=0.0,
            ignore_eos=True,
            stream=True,
            return_output_ids=True,
        )
    assert not [response.error for response in responses if response.error]
    return [token for response in responses for token in response.outputs["output_ids"]]


def test_greedy_ids_of_concurrent_requests_equal_transformers(smollm2: LiveServer) -> None:
    prompts = smollm2_references()[:8]

    def check(prompt: ReferencePrompt) -> None:
        def generate(ids: list[int], num_tokens: int) -> list[int]:
            return _greedy_ids(smollm2, ids, num_tokens)

        ids = generate(prompt.prompt, len(prompt.reference.ids))
        assert_ids_equal(ids, prompt.reference, prompt=prompt.prompt, generate=generate, name=prompt.name)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, prompts))


@pytest.mark.parametrize("stream", [True, False])
def test_messages_are_answered_through_the_models_template(smollm2: LiveServer, stream: bool) -> None:
    with wire(smollm2.target, "smollm2") as client:
        responses = client.ask(messages=json.dumps(QUESTION), stream=stream, return_finish_reason=True, **GREEDY)
    assert text_of(responses) == ANSWER
    reasons = [response.outputs["finish_reason"] for response in responses]
    assert reasons[-1] == [b"length"]
    assert all(reason == [b"None"] for reason in reasons[:-1])


def test_counts_tell_prompt_and_answer(smollm2: LiveServer) -> None:
    with wire(smollm2.target, "smollm2") as client:
        responses = client.ask(
            input_ids=[1, 2, 3, 4, 5],
            stream=True,
            return_num_input_tokens=True,
            return_num_output_tokens=True,
            return_output_ids=True,
            ignore_eos=True,
            **GREEDY,
        )
    assert {tuple(response.outputs["num_input_tokens"]) for response in responses} == {(5,)}
    counts = [sum(response.outputs["num_output_tokens"]) for response in responses]
    assert counts == [len(response.outputs["output_ids"]) for response in responses]
    assert sum(counts) == GREEDY["max_tokens"]


def test_seed_decides_a_sampled_answer(smollm2: LiveServer) -> None:
    def ask(seed: int) -> str:
        with wire(smollm2.target, "smollm2") as client:
            asked = client.ask(messages=json.dumps(QUESTION), max_tokens=12, temperature=1.5, seed=seed, stream=True)
        return text_of(asked)

    assert ask(7) == ask(7)
    assert len({ask(seed) for seed in range(5)}) > 1


def test_http_generate_answers_in_one_json_object(smollm2: LiveServer) -> None:
    body = {"text_input": QUESTION[0]["content"], "apply_chat_template": True, **GREEDY}
    status, text = post(smollm2.http, "/v2/models/smollm2/generate", body)
    assert status == 200
    assert json.loads(text)["text_output"] == ANSWER


def test_http_generate_stream_sends_events(smollm2: LiveServer) -> None:
    body = {"messages": json.dumps(QUESTION), "stream": True, **GREEDY}
    status, text = post(smollm2.http, "/v2/models/smollm2/generate_stream", body)
    assert status == 200
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert "".join(event["text_output"] for event in events) == ANSWER


def test_http_sampling_names_work_as_plain_json_keys(smollm2: LiveServer) -> None:
    body = {"text_input": "Once upon a time", "max_completion_tokens": 3, "temperature": 0, "ignore_eos": True}
    body |= {"return_num_output_tokens": True}
    status, text = post(smollm2.http, "/v2/models/smollm2/generate", body)
    assert status == 200
    assert json.loads(text)["num_output_tokens"] == 3


def test_http_error_is_one_sentence(smollm2: LiveServer) -> None:
    status, text = post(smollm2.http, "/v2/models/smollm2/generate", {"text_input": "Hi", "temprature": 1})
    assert status == 400
    assert "temprature" in text
    assert "Traceback" not in text
