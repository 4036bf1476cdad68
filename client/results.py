"""What comes back: chunks of a streamed answer, and the whole answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

TokenLogprobs: TypeAlias = Mapping[str, Mapping[str, Any]]
"""By token id (as a string): `logprob`, `rank` and `decoded_token`; the token itself first, then the likeliest."""

_ENDINGS = {
    "length": "max_tokens reached",
    "context_full": "the context is full, begin a new conversation",
    "cancelled": "stopped",
    None: "stopped",
}


@dataclass(frozen=True)
class Chunk:
    """One response of the server: the text since the chunk before, and the counts so far."""

    text: str
    output_ids: tuple[int, ...] = ()  # the tokens of this chunk
    num_output_tokens: int = 0  # in this chunk
    finish_reason: str | None = None  # only in the last chunk: stop, length, context_full or cancelled
    num_input_tokens: int = 0  # of this turn, the same in every chunk
    num_cached_tokens: int = 0  # of the context that cost nothing, the same in every chunk
    session_tokens: int | None = None  # length of the session's history after this chunk
    num_dropped_turns: int = 0  # that this turn let go because they no longer fit, the same in every chunk
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens of this chunk, if the option `logprobs` asks for them
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # in one chunk only; the first token has none


@dataclass(frozen=True)
class Generation:
    """A whole answer. Of a stream that was closed or broke off: what had arrived, with `finish_reason` None."""

    text: str
    finish_reason: str | None
    output_ids: tuple[int, ...]
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    session_tokens: int | None
    request_id: str
    ttft_s: float | None  # until the first chunk; None: nothing arrived. Without streaming the whole duration.
    duration_s: float
    num_dropped_turns: int = 0  # oldest turns that no longer fit: `context_overflow`
    replayed: bool = False  # the server no longer had the session, so the transcript was sent again
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens a second after the first chunk; None if that cannot be told."""
        if self.ttft_s is None or self.num_output_tokens < 2 or self.duration_s <= self.ttft_s:
            return None
        return (self.num_output_tokens - 1) / (self.duration_s - self.ttft_s)

    def summary(self) -> str:
        """The counts in one line for a person to read."""
        parts = [f"{self.num_output_tokens} tokens", f"{self.num_input_tokens} in, {self.num_cached_tokens} cached"]
        if self.ttft_s is not None:
            parts.append(f"first after {self.ttft_s:.2f} s")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        if self.finish_reason in _ENDINGS:
            parts.append(_ENDINGS[self.finish_reason])
        if self.num_dropped_turns:
            parts.append(f"oldest turns dropped because they no longer fit: {self.num_dropped_turns}")
        if self.replayed:
            parts.append("the server had lost the conversation, it was sent again")
        return " · ".join(parts)
