"""What a request asks of the sampler; shared by the front ends, the link and the engine. No torch."""

from typing import Literal

import msgspec


class Guide(msgspec.Struct, frozen=True, array_like=True):
    """What form an answer must have: a JSON schema, a regular expression, or a grammar in GBNF with the rule root."""

    kind: Literal["json_schema", "regex", "grammar"]
    source: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling settings of one request, already validated and resolved by the front end.

    `max_tokens` None means "to the end of the context". `temperature` 0 and `top_k` 1 are exact argmax; `top_k` 0
    and `top_p` 1 are off. `stop_token_ids` end the answer like the model's own end ids do, also under `ignore_eos`;
    before `min_tokens` neither can be chosen. `logit_bias` is (id, value) pairs, `bad_words` token sequences.
    `logprobs` and `prompt_logprobs` say how many of the likeliest ids are reported beside the chosen or given one; None
    is off. A `guide` excludes ids that its form does not allow; where it is complete the model's own end ids alone are
    left, whether `ignore_eos` or not.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guide: Guide | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def changes_logits(self) -> bool:
        return self.has_penalties or bool(self.logit_bias or self.bad_words or self.min_tokens)

    @property
    def looks_back(self) -> bool:
        """Whether the runner must know the tokens that a row starts with."""
        return self.has_penalties or bool(self.bad_words) or self.prompt_logprobs is not None
