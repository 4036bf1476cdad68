"""Calls of tools in the text of an answer."""

import json
from typing import Any

import openai
import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st

from limpet.backend.front_end.response_format import response_format
from limpet.client.api.tool_calls import Call, ToolCallParser
from tests.client.fake_server import FakeServer, data

TOOLS = ("look", "add")
HERMES = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
UNKNOWN = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'
# An answer, the text that is shown of it, and the calls (name, arguments) in it.
ANSWERS: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("Just text, 1 < 2.", "Just text, 1 < 2.", []),
    (HERMES, "", [("look", {"at": "é"})]),
    (f"Let me see.\n{HERMES}\n{HERMES}", "Let me see.\n", [("look", {"at": "é"})] * 2),
    (f"{HERMES}\n\nDone.", "Done.", [("look", {"at": "é"})]),
    (f"{UNKNOWN}\nDone.", f"{UNKNOWN}\nDone.", []),
    ('<tool_call>{"name": "add", "arguments": {}}', "", [("add", {})]),
    ("A <tool_call> is no call", "A <tool_call> is no call", []),
    (f"{UNKNOWN}.", f"{UNKNOWN}.", []),
    ("ends in <tool_c", "ends in <tool_c", []),
    ('{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
    (
        ' {"name": "add", "parameters": {"a": 1}}; {"name": "look", "parameters": {}}',
        "",
        [("add", {"a": 1}), ("look", {})],
    ),
    ('{"answer": 4}', '{"answer": 4}', []),
    ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
    ('{"name": "add", "parameters": {"a"', '{"name": "add", "parameters": {"a"', []),
    ('{"name": "add", "parameters": {"a": NaN}}', '{"name": "add", "parameters": {"a": NaN}}', []),
    (r'{"name": "add", "parameters": {"a": "\ud83d"}}', "", [("add", {"a": "\N{REPLACEMENT CHARACTER}"})]),
    ("  ", "  ", []),
]


def parse(pieces: list[str]) -> tuple[str, list[Call]]:
    parser = ToolCallParser(TOOLS)
    parts = [*map(parser.feed, pieces), parser.finish()]
    return "".join(text for text, _ in parts), [call for _, calls in parts for call in calls]


@given(st.sampled_from(ANSWERS), st.data())
def test_calls_are_found_however_the_answer_is_cut(answer: tuple[str, str, list[Any]], data: st.DataObject) -> None:
    text, shown, calls = answer
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found_text, found = parse(pieces)
    assert found_text == shown
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls


def test_text_before_a_call_is_not_held_back() -> None:
    assert ToolCallParser(TOOLS).feed("Let me see. <tool") == ("Let me see. ", [])


OFFERED = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in TOOLS]
QUESTION = [{"role": "user", "content": "Look!"}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_ends_the_answer(server: FakeServer, ask: openai.OpenAI, stream: bool) -> None:
    server.answer = lambda asked: iter(
        [data(HERMES[:20]), data(HERMES[20:], "stop")] if stream else [data(HERMES, "stop")]
    )
    answer = ask.chat.completions.create(model="tiny", messages=QUESTION, tools=OFFERED, stream=stream)  # type: ignore[call-overload]
    choices = [event.choices[0] for event in answer] if stream else answer.choices
    assert choices[-1].finish_reason == "tool_calls"
    messages = [choice.delta if stream else choice.message for choice in choices]
    [call] = [call for message in messages for call in message.tool_calls or []]
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": "é"})
    assert not "".join(message.content or "" for message in messages)
    assert server.asked[0].options["tools"] == OFFERED


def test_calls_and_their_results_are_sent_back(server: FakeServer, ask: openai.OpenAI) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    ask.chat.completions.create(model="tiny", messages=messages, tools=OFFERED)  # type: ignore[call-overload]
    function = {"name": "add", "arguments": {"a": 1}}
    assert server.asked[0].messages == [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]


def test_tool_choice_none_offers_none(server: FakeServer, ask: openai.OpenAI) -> None:
    server.answer = lambda asked: iter([data(HERMES, "stop")])
    answer = ask.chat.completions.create(model="tiny", messages=QUESTION, tools=OFFERED, tool_choice="none")  # type: ignore[call-overload]
    assert answer.choices[0].message.content == HERMES
    assert "tools" not in server.asked[0].options


def test_a_named_tool_fixes_the_form_of_the_answer(server: FakeServer, ask: openai.OpenAI) -> None:
    server.answer = lambda asked: iter([data('{"name": "add", "arguments": {"a": 1}}', "stop")])
    choice = {"type": "function", "function": {"name": "add"}}
    answer = ask.chat.completions.create(model="tiny", messages=QUESTION, tools=OFFERED, tool_choice=choice)  # type: ignore[call-overload]
    assert answer.choices[0].message.tool_calls[0].function.name == "add"
    form = server.asked[0].options["response_format"]
    assert form["json_schema"]["schema"]["properties"] == {"name": {"const": "add"}, "arguments": {"type": "object"}}


@pytest.mark.parametrize("num_tools", [1, 2])
def test_the_server_understands_the_form_of_a_required_call(
    server: FakeServer, ask: openai.OpenAI, num_tools: int
) -> None:
    ask.chat.completions.create(  # type: ignore[call-overload]
        model="tiny", messages=QUESTION, tools=OFFERED[:num_tools], tool_choice="required"
    )
    guide = response_format("response_format", server.asked[0].options["response_format"])
    assert guide is not None
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([*map(chr, range(128))]))
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(guide.source), terminate_without_stop_token=True)
    assert matcher.accept_string('{"name": "look", "arguments": {"at": 1}}')
    assert matcher.is_terminated()
