"""The nouns that scheduler, sessions, engine and runner share. No torch.

A Sequence is one request while it is in the engine: front end or `LocalEngine` fill the first group of its fields, the
scheduler all others. A StepPlan is the whole contract from scheduler to runner: numbers only, so that it can be sent to
other ranks.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from limpet.backend.link.messages import ErrorCode, FinishReason, TokenLogprob
from limpet.backend.prefix_hash import chain_root
from limpet.backend.sampling_params import SamplingParams

if TYPE_CHECKING:
    from limpet.backend.guide_compiler import Guidance

SequenceKey: TypeAlias = Hashable


class RequestError(Exception):
    """A request cannot be served; `code` is the contract's error code, the message one sentence for the caller."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


SoftReference: TypeAlias = tuple[int, bytes]  # (block, content)


@dataclass(slots=True)
class CachedPrefix:
    """Keys and values of a token list's start that may still be in the pool: softly referenced, in block order."""

    references: list[SoftReference] = field(default_factory=list)
    num_tokens: int = 0  # positions that the references cover
    is_shared: bool = False  # a forked session's: others may hold the same references

    def first(self, num_tokens: int, block_size: int) -> "CachedPrefix":
        """What of it serves the first `num_tokens` tokens."""
        count = min(num_tokens, self.num_tokens)
        return CachedPrefix(self.references[: -(-count // block_size)], count)


@dataclass(eq=False)
class Sequence:
    """One request in the engine."""

    key: SequenceKey
    tokens: list[int]  # prompt, then confirmed generated ids
    params: SamplingParams
    max_tokens: int  # clamped to what the context has left
    limit_reason: FinishReason = "length"  # why max_tokens ends it
    priority: int = 0  # smaller is served first
    deadline: float | None = None  # time.monotonic()
    cache_salt: str = ""
    stop_ids: frozenset[int] = frozenset()
    cached_prefix: CachedPrefix = field(default_factory=CachedPrefix)  # when it does not run
    is_turn: bool = False  # of a session, which comes back for what is cached
    guidance: "Guidance | None" = None  # set when it is queued, if its params have a guide

    arrival: int = 0  # rank in the order of arrival
    num_prompt: int = 0
    row: int | None = None  # slot while running
    is_started: bool = False  # the runner knows of its row
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0  # positions whose keys and values are in the blocks, the step in flight included
    num_pending: int = 0  # ids being sampled in flight, not in `tokens` yet
    block_hashes: list[bytes] = field(default_factory=list)  # of the first full blocks of `tokens`
    num_named: int = 0  # leading blocks whose content is set
    num_cached: int | None = None  # tokens that cost nothing when it first ran
    num_preemptions: int = 0
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by position, until the first id is known
    finished: bool = False

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)
        self.chain_root = chain_root(self.cache_salt)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def length(self) -> int:
        """All tokens, those in flight included."""
        return len(self.tokens) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        return self.length - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """The logits of the whole prompt are needed, so that nothing of it may come from the cache."""
        return self.params.prompt_logprobs is not None and not self.num_generated

    @property
    def all_tokens_in_flight(self) -> bool:
        return self.num_generated + self.num_pending >= self.max_tokens

    @property
    def seniority(self) -> tuple[int, int]:
        return self.priority, self.arrival


class RowStart(msgspec.Struct, array_like=True):
    """A row changes its owner: sampling settings and the blocks it starts with.

    `tokens` are the ids known so far where `params.looks_back`; `num_prompt` of them are no answer. `stop_ids` end the
    answer; they are given where it has to have some length first.
    """

    row: int
    params: SamplingParams
    blocks: list[int]
    tokens: list[int] = []
    num_prompt: int = 0
    stop_ids: list[int] = []


class RowWork(msgspec.Struct, array_like=True):
    """What one row computes in a step: positions start … start + num_tokens - 1."""

    row: int
    start: int
    num_tokens: int
    ids: list[int] | None  # None: one token, the id that this row sampled last (it may not have reached the host yet)
    new_blocks: list[int]  # appended to the row's block table
    samples: bool  # the last position's logits are sampled


class StepPlan(msgspec.Struct, array_like=True):
    """One step: `offloads`, `copies`, `loads`, then start rows, append blocks, run `work` (decodes first), sample.

    Rows that wait for `loads` may start in the next step, so that this one need not.
    """

    copies: list[tuple[int, int]]  # (source block, destination block): copy on write
    starts: list[RowStart]
    work: list[RowWork]
    offloads: list[tuple[int, int]] = []  # (block, host block)
    loads: list[tuple[int, int]] = []  # (host block, block)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.work)


@dataclass(frozen=True)
class SampledStep:
    """What a step gave: an id for each sampling row, in the plan's order; logprobs for the rows that ask."""

    ids: list[int]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by index in `ids`
    prompt_logprobs: list[tuple[int, int, list[TokenLogprob]]] = field(default_factory=list)  # work, first position


@dataclass
class SequenceOutput:
    """What a step gave one sequence; `logprobs` is empty or as long as `ids`."""

    sequence: Sequence
    ids: list[int]
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def ends(self) -> bool:
        return self.finish_reason is not None or self.error is not None
