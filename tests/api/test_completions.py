"""/v1/completions as OpenAI's own client sees it."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.client.fake_server import Asked, FakeServer, Response, data

WORDS = {1: "Once", 2: " upon", 3: " a"}


def entry(token: int, logprob: float, other: int) -> dict[str, Any]:
    """A token's logprobs as the wire has them, with one likelier token."""
    return {
        str(token): {"logprob": logprob, "rank": 2, "decoded_token": WORDS[token]},
        str(other): {"logprob": -0.25, "rank": 1, "decoded_token": WORDS[other]},
    }


def tokenizer(operation: dict[str, Any]) -> dict[str, Any]:
    """limpet_admin's tokenize and detokenize over WORDS."""
    if operation["op"] == "tokenize":
        return {"ids": [token for token, word in WORDS.items() if word in operation["text"]]}
    return {"text": "".join(WORDS[token] for token in operation["ids"])}


def test_a_prompt_is_raw_text_or_ids(server: FakeServer, ask: openai.OpenAI) -> None:
    server.answer = lambda asked: iter([data(" upon", "length")])
    answer = ask.completions.create(model="tiny", prompt="Once", max_tokens=3)
    assert (answer.object, answer.choices[0].text) == ("text_completion", " upon")
    ask.completions.create(model="tiny", prompt=[5, 6])
    text, ids = server.asked
    assert text.inputs["text_input"] == "Once"
    assert text.options == {"max_tokens": 3}
    assert text.parameters["apply_chat_template"] is False
    assert ids.inputs["input_ids"] == [5, 6]


def replies_with_its_prompt(asked: Asked) -> Iterator[Response]:
    yield data(asked.inputs["text_input"])
    yield data("!", "stop", num_input=10)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_several_choices(server: FakeServer, ask: openai.OpenAI, stream: bool) -> None:
    prompts = ["a", "b", "c"]
    if stream:
        server.answer = replies_with_its_prompt
        events = list(
            ask.completions.create(model="tiny", prompt=prompts, stream=True, stream_options={"include_usage": True})
        )
        texts = ["".join(e.choices[0].text for e in events[:-1] if e.choices[0].index == i) for i in range(3)]
        usage = events[-1].usage
    else:
        server.answer = lambda asked: iter([data(asked.inputs["text_input"] + "!", "stop", num_input=10)])
        answer = ask.completions.create(model="tiny", prompt=prompts)
        texts, usage = [choice.text for choice in answer.choices], answer.usage
    assert texts == ["a!", "b!", "c!"]
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (30, 6)


def test_one_failure_ends_all_of_several_prompts(server: FakeServer, ask: openai.OpenAI) -> None:
    def answer(asked: Asked) -> Iterator[Response]:
        if asked.inputs["text_input"] == "bad":
            yield Response(error_message="[INVALID_ARG] Bad.")
        else:
            yield data("x")
            asked.gone.wait(30)

    server.answer = answer
    with pytest.raises(openai.BadRequestError, match=r"Bad\."):
        ask.completions.create(model="tiny", prompt=["good", "bad"])
    good = next(asked for asked in server.asked if asked.inputs["text_input"] == "good")
    assert good.gone.wait(30)


@pytest.mark.parametrize("prompt", ["Once upon", [1, 2]])
def test_echo_shows_the_prompt_with_its_logprobs(server: FakeServer, ask: openai.OpenAI, prompt: Any) -> None:
    server.admin = tokenizer
    prompt_logprobs = [None, entry(2, -1.5, 3)]
    server.answer = lambda asked: iter(
        [data(" a", "length", ids=(3,), logprobs=[entry(3, -0.5, 1)], prompt_logprobs=prompt_logprobs)]
    )
    answer = ask.completions.create(model="tiny", prompt=prompt, echo=True, logprobs=1, max_tokens=1)
    [choice] = answer.choices
    assert choice.text == "Once upon a"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["Once", " upon", " a"]
    assert choice.logprobs.token_logprobs == [None, -1.5, -0.5]
    assert choice.logprobs.top_logprobs == [None, {" upon": -1.5, " a": -0.25}, {" a": -0.5, "Once": -0.25}]
    assert choice.logprobs.text_offset == [0, 4, 9]
    assert server.asked[0].options == {"max_tokens": 1, "logprobs": 1, "prompt_logprobs": 1}


def test_a_prompt_alone_is_scored_with_max_tokens_0(server: FakeServer, ask: openai.OpenAI) -> None:
    server.admin = tokenizer
    server.answer = lambda asked: iter(
        [data(" a", "length", ids=(3,), logprobs=[entry(3, -0.5, 1)], prompt_logprobs=[None, entry(2, -1.5, 3)])]
    )
    answer = ask.completions.create(model="tiny", prompt=[1, 2], echo=True, logprobs=1, max_tokens=0)
    assert answer.choices[0].text == "Once upon"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [None, -1.5]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_no_prompt_and_too_many_are_refused(ask: openai.OpenAI) -> None:
    for prompts in ([], ["x"] * 257):
        with pytest.raises(openai.BadRequestError, match="1 to 256"):
            ask.completions.create(model="tiny", prompt=prompts)
