"""What answers to chats and to raw prompts have in common: identity, counts, reasons of their end."""

import time
from dataclasses import dataclass, field
from typing import Any

from limpet.client.api.gateway import SessionTurn
from limpet.client.api.problems import Problem
from limpet.client.api.request_models import GenerationBody
from limpet.client.results import Chunk
from limpet.client.wire import new_id

_FINISH_REASONS = {"context_full": "length", "cancelled": "abort"}  # abort: vLLM's word, OpenAI has none


def finish_reason(chunk: Chunk) -> str | None:
    """OpenAI's word for the end of an answer."""
    return _FINISH_REASONS.get(chunk.finish_reason or "", chunk.finish_reason)


def session_turn(body: GenerationBody) -> SessionTurn | None:
    """The turn that the body's session fields describe; raises Problem if they name no session."""
    if body.session_id is None:
        for name in ("session_start", "session_end", "session_rewind"):
            if getattr(body, name):
                raise Problem(f"{name} needs a session_id.", param=name)
        return None
    return SessionTurn(body.session_id, body.session_start, body.session_end, body.session_rewind or 0)


@dataclass
class Usage:
    """Tokens of one answer. In a session the prompt is the whole context, as far as it was before the answer."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    dropped_turns: int = 0

    def add(self, chunk: Chunk) -> None:
        """Count a chunk of the answer."""
        self.completion += chunk.num_output_tokens
        self.cached = chunk.num_cached_tokens
        self.dropped_turns = chunk.num_dropped_turns
        is_stateless = chunk.session_tokens is None
        self.prompt = chunk.num_input_tokens if is_stateless else (chunk.session_tokens or 0) - self.completion

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.prompt + other.prompt,
            self.cached + other.cached,
            self.completion + other.completion,
            self.dropped_turns + other.dropped_turns,
        )

    def body(self) -> dict[str, Any]:
        """OpenAI's `usage`, and what `context_overflow` dropped of the conversation."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        return usage | ({"num_dropped_turns": self.dropped_turns} if self.dropped_turns else {})


@dataclass(frozen=True)
class Envelope:
    """What stands around the choices of an answer, the same in each of its events."""

    kind: str  # "chat.completion", "chat.completion.chunk", "text_completion"
    model: str
    prefix: str  # of the id
    id: str = field(default_factory=new_id)
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A whole answer, or one event."""
        head = {"id": f"{self.prefix}-{self.id}", "object": self.kind, "created": self.created, "model": self.model}
        return head | {"choices": choices} | more


@dataclass(frozen=True)
class StreamCounts:
    """Which events carry `usage`."""

    at_end: bool
    in_each: bool

    @classmethod
    def wanted(cls, body: GenerationBody) -> "StreamCounts":
        options = body.stream_options
        return cls(False, False) if options is None else cls(options.include_usage, options.continuous_usage_stats)

    def of_event(self, usage: Usage) -> dict[str, Any]:
        """`usage` of an event with a choice: null where the counts come at the end only."""
        if self.in_each:
            return {"usage": usage.body()}
        return {"usage": None} if self.at_end else {}
