"""Logprobs in OpenAI's two forms: objects for chats, parallel lists for raw completions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from limpet.client.results import TokenLogprobs

_HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


def chat_logprobs(tokens: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """`logprobs` of a chat's choice: each token with the `num_top` likeliest ones."""
    return {"content": [_chat_token(each, num_top) for each in tokens], "refusal": None}


def _chat_token(token: TokenLogprobs, num_top: int) -> dict[str, Any]:
    by_rank = sorted(token.values(), key=lambda entry: int(entry["rank"]))
    return _described(next(iter(token.values()))) | {"top_logprobs": [_described(each) for each in by_rank[:num_top]]}


def _described(entry: Mapping[str, Any]) -> dict[str, Any]:
    text = entry["decoded_token"]
    text_bytes = None if _HALF_A_CHARACTER in text else list(text.encode())
    return {"token": text, "logprob": entry["logprob"], "bytes": text_bytes}


@dataclass
class CompletionLogprobs:
    """`logprobs` of a raw completion's choice, filled as its tokens come; `end` is the length of their text."""

    end: int = 0
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, token: TokenLogprobs) -> None:
        """A token, whose own entry comes first; of two tokens with the same text the likelier one counts."""
        own = next(iter(token.values()))
        top: dict[str, float] = {}
        for entry in token.values():
            text = entry["decoded_token"]
            top[text] = max(entry["logprob"], top.get(text, entry["logprob"]))
        self._add(own["decoded_token"], own["logprob"], top)

    def add_first(self, text: str) -> None:
        """A prompt's first token, which nothing predicts."""
        self._add(text, None, None)

    def take(self) -> dict[str, Any]:
        """What has been added since the last call."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        taken = {name: getattr(self, name) for name in names}
        for name in names:
            setattr(self, name, [])
        return taken

    def _add(self, text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        self.tokens.append(text)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(self.end)
        self.end += len(text)
