"""The logprobs of one answer, and how they are written: JSON, one object per token."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from limpet.backend.link.messages import TokenLogprob


class AnswerLogprobs:
    """Follows one answer; `token_text` gives a token's own text."""

    def __init__(self, token_text: Callable[[int], str]) -> None:
        self._token_text = token_text
        self._entries: list[TokenLogprob] = []  # of the generated ids
        self._prompt: list[TokenLogprob] = []  # of the prompt's ids after the first
        self._is_prompt_written = False
        self._num_summed = 0
        self._sum = 0.0

    def add(self, entries: Sequence[TokenLogprob], prompt: Sequence[TokenLogprob]) -> None:
        """What came with new ids; `prompt` with the first ones."""
        self._entries += entries
        self._prompt += prompt

    def values(self, start: int, end: int) -> list[float]:
        """Logprobs of the answer's ids from `start` to `end`."""
        return [entry.logprob for entry in self._entries[start:end]]

    def cumulative(self, end: int) -> float:
        """The sum over the first `end` ids; `end` never falls."""
        self._sum += sum(self.values(self._num_summed, end))
        self._num_summed = end
        return self._sum

    def written(self, ids: Sequence[int], start: int) -> str:
        """JSON for `ids`, which stand at `start` in the answer."""
        entries = self._entries[start : start + len(ids)]
        return json.dumps([self._object(token, entry) for token, entry in zip(ids, entries, strict=True)])

    def prompt_written(self, ids: Sequence[int]) -> str | None:
        """JSON for the prompt's ids, the first of which has no logprob; None after the first call, or without ids."""
        if self._is_prompt_written or len(self._prompt) != len(ids) - 1:
            return None
        self._is_prompt_written = True
        pairs = zip(ids[1:], self._prompt, strict=True)
        return json.dumps([None, *(self._object(token, entry) for token, entry in pairs)])

    def _object(self, token: int, entry: TokenLogprob) -> dict[str, Any]:
        """The token itself first, then the likeliest, by rank."""
        ranked = zip(entry.top_ids, entry.top_logprobs, strict=True)
        others = [(other, logprob, rank) for rank, (other, logprob) in enumerate(ranked, 1) if other != token]
        each = [(token, entry.logprob, entry.rank), *others]
        return {
            str(other): {"logprob": logprob, "rank": rank, "decoded_token": self._token_text(other)}
            for other, logprob, rank in each
        }
