"""/v1/chat/completions as OpenAI's own client sees it, in front of a server that answers as the test says."""

import openai
import pytest

from tests.client.fake_server import FakeServer, data

QUESTION = [{"role": "user", "content": "Hi"}]


def test_whole_answer_with_its_counts(server: FakeServer, ask: openai.OpenAI) -> None:
    server.answer = lambda asked: iter([data("Good day", "length", num_input=7, num_cached=2)])
    answer = ask.chat.completions.create(model="tiny", messages=QUESTION)  # type: ignore[arg-type]
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Good day", "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 8, 15)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert server.asked[0].inputs["stream"] is False


def test_turns_that_were_dropped_are_counted(server: FakeServer, ask: openai.OpenAI) -> None:
    overflow = {"context_overflow": "drop_oldest_turns"}
    for num_dropped, shown in ((2, 2), (0, None)):
        server.answer = lambda asked, num_dropped=num_dropped: iter([data("Hi", "stop", num_dropped=num_dropped)])
        answer = ask.chat.completions.create(model="tiny", messages=QUESTION, extra_body=overflow)  # type: ignore[arg-type]
        assert answer.usage is not None
        assert getattr(answer.usage, "num_dropped_turns", None) == shown


def test_streamed_answer_ends_with_its_counts(ask: openai.OpenAI) -> None:
    stream = ask.chat.completions.create(
        model="tiny",
        messages=QUESTION,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
    )
    *events, last = list(stream)
    assert [event.choices[0].delta.content for event in events] == ["Hello ", "world"]
    assert [event.choices[0].delta.role for event in events] == ["assistant", None]
    assert [event.choices[0].finish_reason for event in events] == [None, "stop"]
    assert all(event.usage is None for event in events)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len("Hello world")
    assert {event.id for event in events} == {last.id}


def test_counts_so_far_in_every_event(ask: openai.OpenAI) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    stream = ask.chat.completions.create(model="tiny", messages=QUESTION, stream=True, extra_body=options)  # type: ignore[call-overload]
    assert [event.usage.completion_tokens for event in stream] == [6, 11, 11]


def test_options_reach_the_server_under_its_names(server: FakeServer, ask: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    ask.chat.completions.create(  # type: ignore[call-overload]
        model="tiny",
        messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        stop=["a", "b"],
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"5": -1},
        response_format=form,
        logprobs=True,
        top_logprobs=3,
        n=1,
        user="me",
        extra_body={"top_k": 4, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [3], "priority": 2},
    )
    assert server.asked[0].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert server.asked[0].options == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["a", "b"],
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "logit_bias": {"5": -1.0},
        "response_format": form,
        "ignore_eos": True,
        "stop_token_ids": [3],
        "request_priority": 2,
        "logprobs": 3,
    }


def test_content_in_parts_is_one_text(server: FakeServer, ask: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]
    ask.chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}])  # type: ignore[list-item,misc]
    assert server.asked[0].messages == [{"role": "user", "content": "Hi there"}]


def test_an_answer_may_be_sent_back_as_it_came(server: FakeServer, ask: openai.OpenAI) -> None:
    message = ask.chat.completions.create(model="tiny", messages=QUESTION).choices[0].message  # type: ignore[arg-type]
    ask.chat.completions.create(model="tiny", messages=[*QUESTION, message, *QUESTION])  # type: ignore[list-item]
    assert server.asked[1].messages == [*QUESTION, {"role": "assistant", "content": "Hello world"}, *QUESTION]


def test_logprobs_of_the_likeliest_by_rank(server: FakeServer, ask: openai.OpenAI) -> None:
    first = {
        "7": {"logprob": -2.0, "rank": 3, "decoded_token": "ä"},
        "8": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
        "9": {"logprob": -1.0, "rank": 2, "decoded_token": "\ufffd"},
    }
    server.answer = lambda asked: iter([data("ä", "stop", ids=(7,), logprobs=[first])])
    for stream in (False, True):
        answer = ask.chat.completions.create(  # type: ignore[call-overload]
            model="tiny", messages=QUESTION, logprobs=True, top_logprobs=2, stream=stream
        )
        [token] = (next(iter(answer)) if stream else answer).choices[0].logprobs.content
        assert (token.token, token.logprob, token.bytes) == ("ä", -2.0, [0xC3, 0xA4])
        assert [(top.token, top.logprob, top.bytes) for top in token.top_logprobs] == [
            ("b", -0.5, [ord("b")]),
            ("\ufffd", -1.0, None),
        ]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_come_on_request(server: FakeServer, ask: openai.OpenAI, stream: bool) -> None:
    server.admin = lambda operation: {"ids": [len(operation["messages"])]}
    answer = ask.chat.completions.create(  # type: ignore[call-overload]
        model="tiny", messages=QUESTION, stream=stream, extra_body={"return_token_ids": True}
    )
    pieces = list(answer) if stream else [answer]
    assert pieces[0].prompt_token_ids == [1]
    assert [token for piece in pieces for token in piece.choices[0].token_ids] == [*range(6), *range(5)]
