"""Rendering a chat template as transformers does, to try whether it only ever appends."""

import datetime
import itertools
import json
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from limpet.backend.checkpoint import TokenizerConfig
from limpet.converter.errors import ConversionError

Message = dict[str, str]
_TURNS: list[Message] = [
    {"role": "user", "content": "First question?"},
    {"role": "assistant", "content": "First answer."},
    {"role": "user", "content": "Second question?"},
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSecond answer."},
    {"role": "user", "content": "Third question?"},
]


def is_append_only(source: str, config: TokenizerConfig) -> bool:
    """Whether each turn's prompt is a prefix of the next one's; raises ConversionError if it cannot be rendered.

    A template that is not (Qwen3's drops earlier thoughts) costs a session the reuse of what changed.
    """
    template = compile_template(source)
    prompts = [render(template, _TURNS[:count], config) for count in (1, 3, 5)]
    return all(later.startswith(earlier) for earlier, later in itertools.pairwise(prompts))


def compile_template(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConversionError(f"The chat template cannot be compiled: {error}.") from None


def render(template: jinja2.Template, messages: list[Message], config: TokenizerConfig) -> str:
    """The prompt of a conversation that ends with a user's message."""
    tokens = {"bos_token": config.bos_token or "", "eos_token": config.eos_token or ""}
    try:
        return template.render(messages=messages, add_generation_prompt=True, **tokens)
    except Exception as error:  # noqa: BLE001  a template may fail in any way that Python can
        raise ConversionError(f"The chat template fails on a plain conversation: {error}.") from None


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
