"""The checkpoint's chat template: Jinja as transformers runs it (sandboxed, same options, filters and globals)."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, TypeAlias

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from limpet.backend.checkpoint import TokenizerConfig

Message: TypeAlias = Mapping[str, Any]
"""`role` and `content`, strings; with tools also `tool_calls`, `tool_call_id` and `name`."""
Tool: TypeAlias = Mapping[str, Any]
"""What the model may call, as OpenAI describes it: `type` and `function`."""


class TemplateError(Exception):
    """The template is no valid Jinja, or refuses these messages; the text is its own reason."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's tokens for training; here it shows its body."""

    tags = {"generation"}  # noqa: RUF012 - the attribute that Jinja reads

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """Renders whole conversations."""

    def __init__(self, source: str, config: TokenizerConfig) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        self._variables = {name: value for name in names if (value := getattr(config, name)) is not None}
        try:
            self._template = environment.from_string(source)
            self._takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise TemplateError(f"The model's chat template is no valid Jinja: {error}.") from None

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """The conversation with the beginning of the assistant's next message; raises TemplateError."""
        if tools and not self._takes_tools:
            raise TemplateError("The model's chat template knows no tools: send none.")
        try:
            return self._template.render(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=True,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            raise TemplateError(f"The model's chat template refuses these messages: {error}.") from None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own tojson escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
