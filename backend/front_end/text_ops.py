"""Operations tokenize and detokenize of limpet_admin: one model's tokenizer and template, without its engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from limpet.backend.chat_template import ChatTemplate, TemplateError
from limpet.backend.checkpoint import CheckpointDir, CheckpointError
from limpet.backend.front_end.conversation import Conversation
from limpet.backend.front_end.errors import RequestError
from limpet.backend.front_end.prompts import NOTHING_BEFORE
from limpet.backend.front_end.request import checked_messages
from limpet.backend.tokenizer import Tokenizer

TEXT_OPS = ("tokenize", "detokenize")
_MAX_CHARS = 1_000_000
_MAX_IDS = 1_000_000


class TextOps:
    """What clients ask of a tokenizer. Safe to share between threads."""

    def __init__(self, model_dir: Path) -> None:
        """Raises RequestError for a model that cannot be read."""
        checkpoint = CheckpointDir(model_dir)
        try:
            self._tokenizer = Tokenizer.load(checkpoint)
            source = checkpoint.chat_template()
            template = ChatTemplate(source, self._tokenizer.config) if source is not None else None
        except (CheckpointError, TemplateError) as error:
            raise RequestError(str(error), "UNAVAILABLE") from None
        self._conversation = Conversation(self._tokenizer, template)

    def run(self, op: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one of TEXT_OPS; raises RequestError."""
        return self._tokenize(arguments) if op == "tokenize" else self._detokenize(arguments)

    def _tokenize(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The ids of the prompt that a request with this text, or these messages, has."""
        ids = self._prompt(arguments)
        return {"ids": ids, "num_tokens": len(ids)}

    def _prompt(self, arguments: Mapping[str, Any]) -> list[int]:
        match arguments:
            case {"text": str() as text, **others} if not others:
                _check_length(text)
                return self._tokenizer.encode_prompt(text)
            case {"messages": given, **others} if not others:
                messages = checked_messages(given)
                _check_length("".join(message["content"] for message in messages))
                try:
                    return self._conversation.turn(NOTHING_BEFORE, messages).ids
                except TemplateError as error:
                    raise RequestError(str(error)) from None
        raise RequestError('op tokenize needs either "text", a string, or "messages", a list.')

    def _detokenize(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The text of ids, as answers show it: without special tokens."""
        ids = arguments.get("ids")
        highest = 2**31 - 1  # ids past the vocabulary are padding of the embedding, without text
        if not isinstance(ids, list) or not all(type(each) is int and 0 <= each <= highest for each in ids):
            raise RequestError(f'op detokenize needs "ids", a list of whole numbers from 0 to {highest}.')
        if len(ids) > _MAX_IDS:
            raise RequestError(f"There are {len(ids)} ids; allowed: {_MAX_IDS}.")
        return {"text": self._tokenizer.decode(ids)}


def _check_length(text: str) -> None:
    if len(text) > _MAX_CHARS:
        raise RequestError(f"The text has {len(text)} characters; allowed: {_MAX_CHARS}.")
