"""A session's past: its tokens, the turns in them, and how both are cut. No torch.

Token ids are kept as int32 arrays that nobody changes once they are made: 4 bytes a token, shared between forks.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from limpet.backend.core import RequestError

TokenArray: TypeAlias = "array[int]"


def token_array(ids: Iterable[int] | bytes = ()) -> TokenArray:
    return array("i", ids)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: its new messages (JSON; None: raw), the ids that answered it, where it ends in the history."""

    messages: str | None
    reply: TokenArray
    end: int


@dataclass(frozen=True, slots=True)
class History:
    """All tokens of a conversation; `turns[-1].end == len(tokens)`, and no turns mean no tokens."""

    tokens: TokenArray
    turns: list[Turn]

    def cut(self, truncate_to: int | None, rewind: int) -> "History":
        """Truncated to a number of tokens, then without the last `rewind` turns; raises RequestError INVALID_ARG."""
        turns = list(self.turns)
        if truncate_to is not None:
            if not 0 <= truncate_to <= len(self.tokens):
                raise RequestError(
                    "INVALID_ARG",
                    f"session_tokens is {truncate_to}; the session has {len(self.tokens)} tokens (0 is allowed).",
                )
            turns = self._truncated_turns(truncate_to)
        if not 0 <= rewind <= len(turns):
            raise RequestError(
                "INVALID_ARG", f"session_rewind is {rewind}; the session has {len(turns)} earlier turns."
            )
        turns = turns[: len(turns) - rewind]
        return History(self.tokens[: turns[-1].end if turns else 0], turns)

    def common_prefix_length(self, prompt: list[int]) -> int:
        """Number of leading tokens that the prompt shares, by bisection: comparing slices runs at memory speed."""
        ours, theirs = self.tokens, token_array(prompt)
        low, high = 0, min(len(ours), len(theirs))
        if ours[:high] == theirs[:high]:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if ours[low:middle] == theirs[low:middle]:
                low = middle
            else:
                high = middle
        return low

    def _truncated_turns(self, num_tokens: int) -> list[Turn]:
        kept = [turn for turn in self.turns if turn.end <= num_tokens]
        reached = kept[-1].end if kept else 0
        if reached < num_tokens:
            kept.append(self._shortened(self.turns[len(kept)], num_tokens))
        return kept

    def _shortened(self, turn: Turn, end: int) -> Turn:
        """The turn cut at `end`: its reply shortened, or a raw turn where the cut goes through its prompt."""
        prompt_end = turn.end - len(turn.reply)
        if end >= prompt_end and self.tokens[prompt_end : turn.end] == turn.reply:
            return Turn(turn.messages, turn.reply[: end - prompt_end], end)
        return Turn(None, token_array(), end)
