"""Tools and their calls in the prompt, against transformers' apply_chat_template."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from limpet.backend.chat_template import ChatTemplate, TemplateError
from tests.front_end.sample_templates import CHATML
from tests.front_end.sample_tokenizers import BOS, EOS, byte_level
from tests.front_end.test_conversation import CONFIG, begun, conversation_of, user
from tests.front_end.test_request import read, refusal

# The Hermes format, as Qwen's templates have it.
HERMES = """\
{%- if tools -%}
{{ '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools -%}{{ tool | tojson + '\\n' }}{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
{{- '\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "description": "Look <there> 你好", "parameters": PARAMETERS}}
]
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"place": "über"}}}
MESSAGES: list[dict[str, Any]] = [
    *user("What is there?"),
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "A limpet.", "tool_call_id": "1", "name": "look"},
]


def test_tools_and_calls_are_rendered_as_in_transformers() -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_level().backend, bos_token=BOS, eos_token=EOS)
    fast.chat_template = HERMES
    expected = fast.apply_chat_template(MESSAGES, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(HERMES, CONFIG).render(MESSAGES, TOOLS) == expected
    prompt = conversation_of(HERMES, byte_level()).turn(begun([]), MESSAGES, TOOLS)
    assert prompt.ids == byte_level().backend.encode(expected, add_special_tokens=False).ids


def test_a_template_without_tools_refuses_them() -> None:
    assert ChatTemplate(CHATML, CONFIG).render(user("Hi"))
    with pytest.raises(TemplateError, match="knows no tools"):
        ChatTemplate(CHATML, CONFIG).render(user("Hi"), TOOLS)


def test_requests_carry_tools_and_messages_of_calls() -> None:
    content = read(None, sampling={"tools": TOOLS}, messages=json.dumps(MESSAGES).encode()).content
    assert content is not None
    assert (content.messages, list(content.tools)) == (MESSAGES, TOOLS)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user"}, "must have the keys role and content"),
        ({"role": "user", "content": "x", "mood": "y"}, "must have the keys role and content"),
        ({"role": "user", "content": None}, "content of message 1 must be a string"),
        ({"role": "", "content": "x"}, "role of message 1 must be a string"),
        ({"role": "assistant", "content": "", "tool_calls": {}}, "tool_calls of message 1 must be a list"),
    ],
)
def test_messages_of_another_shape_are_refused(message: dict[str, Any], says: str) -> None:
    assert says in refusal(None, messages=json.dumps([message]).encode())


def test_tools_are_a_list_of_objects() -> None:
    assert "a list of up to 128 objects" in refusal(sampling={"tools": "look"})
    assert "129 entries" in refusal(sampling={"tools": [{}] * 129})
