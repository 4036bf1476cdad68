"""What a caller may ask of an answer, under the wire contract's names."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation: objects with `role` ("system", "user", "assistant", ...) and `content`."""


class Options(TypedDict, total=False):
    """Options of one answer, all optional; None means the model's own default. The server checks them."""

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    ignore_eos: bool | None
    logit_bias: Mapping[str, float] | None
    logprobs: int | None
    prompt_logprobs: int | None
    response_format: Mapping[str, Any] | None
    structured_outputs: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None
    lora_name: str | None
    request_priority: int | None
    timeout_ms: int | None
    cache_salt: str | None
    context_overflow: str | None
