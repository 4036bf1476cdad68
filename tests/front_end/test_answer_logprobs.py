"""Logprobs in responses: as many as ids, in every style, and JSON that any parser reads."""

import json
from typing import Any

import pytest

from limpet.backend.link.messages import CancelRequested, Outputs, Settle, TokenLogprob, TokenOutput
from tests.front_end.conftest import Stage
from tests.front_end.fake_triton import InferenceResponse

ALTERNATIVES = [70, 71]


def entry(number: int) -> TokenLogprob:
    return TokenLogprob(-0.5 * number, number, ALTERNATIVES, [-0.25, -9999.0])


def generate(stage: Stage, key: int, text: str, first: int, reason: Any = None) -> list[int]:
    """One id per character of `text`, their entries numbered from `first`."""
    ids: list[int] = [stage.tokenizer.backend.token_to_id(char) for char in text]
    entries = [entry(first + index) for index in range(len(ids))]
    stage.engine.send(Outputs([TokenOutput(key, ids, reason, logprobs=entries)]))
    return ids


def written(response: InferenceResponse, name: str = "logprobs") -> list[Any]:
    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    listed: list[Any] = json.loads(response.value(name), parse_constant=refuse)
    return listed


def test_each_response_has_the_logprobs_of_its_ids(stage: Stage) -> None:
    switches = {"return_output_ids": True, "return_cumulative_logprob": True, "return_log_probs": True}
    sender = stage.ask(stream=True, sampling_parameters='{"logprobs": 2}', **switches)
    submit = stage.submitted()
    assert submit.params.logprobs == 2
    generate(stage, submit.key, "ab", 1)
    sender.wait_for(1)
    generate(stage, submit.key, "c", 3, reason="length")
    first, last = sender.all()
    [a, b] = first.value("output_ids")
    assert written(first)[0] == {
        str(a): {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        **{
            str(token): {"logprob": value, "rank": rank, "decoded_token": stage.tokenizer.decode([token])}
            for rank, (token, value) in enumerate(zip(ALTERNATIVES, [-0.25, -9999.0], strict=True), 1)
        },
    }
    assert [next(iter(each)) for each in written(first)] == [str(a), str(b)]
    assert [next(iter(each.values()))["logprob"] for each in written(last)] == [-1.5]
    assert [response.outputs["cumulative_logprob"].tolist() for response in (first, last)] == [[-1.5], [-3.0]]
    assert [response.outputs["cum_log_probs"].tolist() for response in (first, last)] == [[-1.5], [-3.0]]
    assert [r.outputs["output_log_probs"].tolist() for r in (first, last)] == [[[-0.5, -1.0]], [[-1.5]]]


def test_what_a_stop_string_cuts_off_has_no_logprobs(stage: Stage) -> None:
    sender = stage.ask(stop_words=["c"], return_logprobs=True, return_output_ids=True, return_cumulative_logprob=True)
    submit = stage.submitted()
    assert submit.params.logprobs == 0
    generate(stage, submit.key, "abcd", 1)
    assert stage.engine.expect(Settle).keep == 2
    [response] = sender.all()
    assert len(written(response)) == len(response.value("output_ids")) == 2
    assert response.value("cumulative_logprob") == -1.5


def test_prompt_logprobs_come_once(stage: Stage) -> None:
    sender = stage.ask("Hi", stream=True, sampling_parameters='{"prompt_logprobs": 2}')
    submit = stage.submitted()
    assert (submit.params.prompt_logprobs, submit.params.logprobs) == (2, None)
    prompt = stage.tokenizer.encode_prompt("Hi")
    entries = [entry(number) for number in range(1, len(prompt))]
    stage.engine.send(Outputs([TokenOutput(submit.key, [prompt[-1]], prompt_logprobs=entries)]))
    sender.wait_for(1)
    stage.generate(submit.key, "b", "length")
    first, last = sender.all()
    assert written(first, "prompt_logprobs")[0] is None
    assert [next(iter(each)) for each in written(first, "prompt_logprobs")[1:]] == [str(token) for token in prompt[1:]]
    assert set(last.outputs) == {"text_output"}


def test_an_answer_cancelled_before_its_first_id_has_no_prompt_logprobs(stage: Stage) -> None:
    sender = stage.ask("Hi", sampling_parameters='{"prompt_logprobs": 2, "logprobs": 1}')
    stage.engine.send(CancelRequested(stage.submitted().key))
    stage.engine.expect(Settle)
    [response] = sender.all()
    assert set(response.outputs) == {"text_output", "logprobs"}
    assert written(response) == []
