"""Logprobs of the model's own distribution: logits before bias, penalties, temperature and filters.

Computed on the device for the rows that ask, and read back together with the step's ids as one float64 array each
(ids are exact in it): chosen id's logprob and rank, then the likeliest ids and their logprobs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.backend.core import RowStart, StepPlan
from limpet.backend.link.messages import TokenLogprob

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot hold
_SLICE = 128  # positions of a prompt whose logits are in memory at once


@dataclass(frozen=True)
class PromptPart:
    """Positions of a prompt that a step computes and whose next id is known."""

    work: int  # index in the plan
    first_token: int  # of the step's tokens
    first_position: int  # of the first id that is given a logprob
    ids: list[int]
    num_top: int

    def read(self, table: Tensor) -> list[TokenLogprob]:
        return [_entry(row, self.num_top) for row in table.tolist()]


def logprob_table(logits: Tensor, ids: Tensor, num_top: int) -> Tensor:
    """Per row of logits [n, vocab] and its id: logprob, rank, top ids, top logprobs. # [n, 2 + 2 * num_top] float64"""
    logits = logits.float()
    chosen = logits.gather(1, ids.unsqueeze(1))  # [n, 1]
    rank = (logits > chosen).sum(dim=1, keepdim=True) + 1
    top = logits.topk(min(num_top, logits.shape[1]), dim=1)
    normaliser = logits.logsumexp(dim=1, keepdim=True)
    logprob, top_logprobs = ((values - normaliser).clamp(min=LOWEST).double() for values in (chosen, top.values))
    return torch.cat((logprob, rank.double(), top.indices.double(), top_logprobs), dim=1)


class LogprobRows:
    """Which rows want logprobs of what they sample, and of their prompts."""

    def __init__(self) -> None:
        self._sampled: dict[int, int] = {}  # by row: how many of the likeliest ids
        self._prompts: dict[int, tuple[int, list[int]]] = {}  # by row: that, and the prompt

    def start(self, starts: list[RowStart]) -> None:
        """Rows change their owners; a prompt is reported only before the first id of its answer."""
        for start in starts:
            self._sampled.pop(start.row, None)
            self._prompts.pop(start.row, None)
            if start.params.logprobs is not None:
                self._sampled[start.row] = start.params.logprobs
            if start.params.prompt_logprobs is not None and len(start.tokens) == start.num_prompt:
                self._prompts[start.row] = start.params.prompt_logprobs, start.tokens

    def sampled(self, host_rows: Sequence[int]) -> dict[int, int]:
        """Index among the sampled -> how many of the likeliest ids, for the rows that ask."""
        if not self._sampled:
            return {}
        return {index: self._sampled[row] for index, row in enumerate(host_rows) if row in self._sampled}

    def prompt_parts(self, plan: StepPlan) -> list[PromptPart]:
        """What of the plan's tokens is reported."""
        parts: list[PromptPart] = []
        if not self._prompts:
            return parts
        first_token = 0
        for index, work in enumerate(plan.work):
            num_top, prompt = self._prompts.get(work.row, (0, []))
            ids = prompt[work.start + 1 : work.start + 1 + work.num_tokens]
            if ids:
                parts.append(PromptPart(index, first_token, work.start + 1, ids, num_top))
            first_token += work.num_tokens
        return parts


def sampled_table(logits: Tensor, ids: Tensor, wanted: dict[int, int]) -> Tensor:
    """The table of the sampled rows in `wanted`, in its order."""
    places = torch.tensor(list(wanted), pin_memory=logits.is_cuda).to(logits.device, non_blocking=True)
    return logprob_table(logits[places], ids[places].clamp(min=0), max(wanted.values()))


def read_sampled(table: Tensor, wanted: dict[int, int]) -> dict[int, TokenLogprob]:
    """By index among the sampled."""
    rows = table.tolist()
    return {index: _entry(row, num_top) for (index, num_top), row in zip(wanted.items(), rows, strict=True)}


def prompt_table(to_logits: Callable[[Tensor], Tensor], hidden: Tensor, part: PromptPart) -> Tensor:
    """The table of a part; a slice of its logits at a time, since all of them may be gigabytes."""
    ids = torch.tensor(part.ids, pin_memory=hidden.is_cuda).to(hidden.device, non_blocking=True)
    states = hidden[part.first_token : part.first_token + len(part.ids)]
    pairs = zip(torch.split(states, _SLICE), torch.split(ids, _SLICE), strict=True)
    return torch.cat([logprob_table(to_logits(state), target, part.num_top) for state, target in pairs])


def _entry(row: list[float], num_top: int) -> TokenLogprob:
    logprob, rank, *rest = row
    width = len(rest) // 2
    ids, logprobs = rest[:width][:num_top], rest[width:][:num_top]
    return TokenLogprob(logprob, int(rank), [int(token) for token in ids], logprobs)
