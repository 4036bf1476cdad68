"""Trying a chat template on a plain conversation, in transformers' sandbox, before a model is built around it."""

import itertools

from transformers.utils.chat_template_utils import render_jinja_template

from limpet.backend.checkpoint import TokenizerConfig
from limpet.converter.errors import ConversionError

_CONVERSATION = [
    {"role": "user", "content": "First question?"},
    {"role": "assistant", "content": "First answer."},
    {"role": "user", "content": "Second question?"},
    # Thoughts in an answer are what some templates drop from earlier turns.
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSecond answer."},
    {"role": "user", "content": "Third question?"},
]


def is_append_only(template: str, config: TokenizerConfig) -> bool:
    """Whether each turn's prompt is a prefix of the next one's; raises ConversionError if it cannot be rendered."""
    prompts = [_prompt(template, num_messages, config) for num_messages in (1, 3, 5)]
    return all(later.startswith(earlier) for earlier, later in itertools.pairwise(prompts))


def _prompt(template: str, num_messages: int, config: TokenizerConfig) -> str:
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: value for name in names if (value := getattr(config, name)) is not None}
    conversation = _CONVERSATION[:num_messages]
    try:
        prompts, _ = render_jinja_template([conversation], chat_template=template, add_generation_prompt=True, **tokens)
    except Exception as error:  # noqa: BLE001 - a template may fail in every way that Python can
        raise ConversionError(
            f"The chat template fails on a plain conversation ({error}): see --chat-template."
        ) from None
    return str(prompts[0])
