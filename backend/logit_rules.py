"""What a request asks to be done to its logits before an id is drawn: bias, penalties, banned ids.

In this order, as transformers has it: logit_bias is added; repetition_penalty divides positive and multiplies negative
logits of ids that prompt, history or answer hold (Keskar et al. 2019, section 4.1); presence_penalty and
frequency_penalty (times the count) are subtracted for ids of the answer; last, ids that bad_words and min_tokens
forbid become minus infinity. Only rows that ask for something have state here, and nothing waits for the device:
counts are kept there, since the id sampled last is not on the host when the next step is queued.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from limpet.backend.banned_words import BannedWords
from limpet.backend.core import RowStart
from limpet.backend.sampling_params import SamplingParams
from limpet.backend.staging import send

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass
class _Row:
    """What one row asks for; its prompt, history included, has `num_prompt` ids."""

    params: SamplingParams
    num_prompt: int
    bias_ids: Ints
    bias: Floats
    banned: Ints  # always
    stop_ids: Ints  # until min_tokens
    words: BannedWords | None  # of several tokens

    @classmethod
    def of(cls, start: RowStart, vocab_size: int, device: torch.device) -> "_Row":
        """Without end ids past the vocabulary, which a checkpoint may name: they would lie in the next row's logits."""
        params = start.params
        several = [word for word in params.bad_words if len(word) > 1]
        return cls(
            params=params,
            num_prompt=start.num_prompt,
            bias_ids=np.array([token for token, _ in params.logit_bias], dtype=np.int64),
            bias=np.array([value for _, value in params.logit_bias], dtype=np.float32),
            banned=np.array([word[0] for word in params.bad_words if len(word) == 1], dtype=np.int64),
            stop_ids=np.array([token for token in start.stop_ids if token < vocab_size], dtype=np.int64),
            words=BannedWords(several, start.tokens, device) if several else None,
        )

    def banned_at(self, position: int) -> Ints:
        """Ids that may not stand at that position."""
        is_early = position - self.num_prompt < self.params.min_tokens
        return np.concatenate((self.banned, self.stop_ids)) if is_early else self.banned


@dataclass
class _Penalties:
    """Penalties and counts of all rows, on the device; made when the first row asks."""

    repetition: Tensor  # [num_rows]
    presence: Tensor  # [num_rows]
    frequency: Tensor  # [num_rows]
    seen: Tensor  # [num_rows, vocab] bool: in prompt, history or answer
    counts: Tensor  # [num_rows, vocab] int32: in the answer

    @classmethod
    def make(cls, num_rows: int, vocab_size: int, device: torch.device) -> "_Penalties":
        repetition, presence, frequency = torch.zeros((3, num_rows), device=device)
        seen = torch.zeros((num_rows, vocab_size), dtype=torch.bool, device=device)
        return cls(
            repetition, presence, frequency, seen, torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=device)
        )

    def start(self, start: RowStart) -> None:
        row, params = start.row, start.params
        self.repetition[row] = params.repetition_penalty
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        known = np.array(start.tokens, dtype=np.int64)
        every, answered = send([known, known[start.num_prompt :].copy()], self.seen.device)
        self.seen[row].zero_().index_fill_(0, every, True)
        self.counts[row].zero_().index_add_(0, answered, torch.ones_like(answered, dtype=torch.int32))

    def apply(self, logits: Tensor, places: Tensor, rows: Tensor) -> None:
        """Change logits[places], which belong to `rows`."""
        scores, counts = logits[places], self.counts[rows]  # [num_places, vocab]
        factor = self.repetition[rows].unsqueeze(1)
        repeated = torch.where(scores < 0, scores * factor, scores / factor)
        scores = torch.where(self.seen[rows], repeated, scores)
        scores -= self.frequency[rows].unsqueeze(1) * counts + self.presence[rows].unsqueeze(1) * (counts > 0)
        logits.index_copy_(0, places, scores)

    def count(self, rows: Tensor, ids: Tensor) -> None:
        """`ids[i]` has been sampled for `rows[i]`."""
        cells = rows * self.seen.shape[1] + ids
        self.seen.view(-1).index_fill_(0, cells, True)
        self.counts.view(-1).index_add_(0, cells, torch.ones_like(ids, dtype=torch.int32))


@dataclass
class StepRules:
    """The rules of one step's sampled rows: `apply` to the logits, then `count` the ids drawn from them."""

    places: list[int]  # of the rows with rules, among the sampled
    rows: list[_Row]
    positions: list[int]  # where the new ids will stand
    penalties: _Penalties | None
    penalised: tuple[Tensor, Tensor] | None  # places and rows
    _words: list[tuple[int, BannedWords]] = field(default_factory=list)

    def __post_init__(self) -> None:
        pairs = zip(self.places, self.rows, strict=True)
        self._words = [(place, row.words) for place, row in pairs if row.words is not None]

    def apply(self, logits: Tensor) -> Tensor:
        """Changed float32 logits; `logits` [num_sampled, vocab] stay as they are."""
        changed = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self._add_bias(changed)
        if self.penalties is not None and self.penalised is not None:
            self.penalties.apply(changed, *self.penalised)
        self._ban(changed)
        for place, words in self._words:
            words.ban(changed[place])
        return changed

    def count(self, ids: Tensor) -> None:
        """`ids` [num_sampled] have been drawn."""
        ids = ids.clamp(min=0)
        if self.penalties is not None and self.penalised is not None:
            places, rows = self.penalised
            self.penalties.count(rows, ids[places])
        for place, words in self._words:
            words.add(ids[place : place + 1])

    def _add_bias(self, logits: Tensor) -> None:
        biased = [(place, row) for place, row in zip(self.places, self.rows, strict=True) if len(row.bias)]
        if biased:
            cells = np.concatenate([place * logits.shape[1] + row.bias_ids for place, row in biased])
            cells_, values = send([cells, np.concatenate([row.bias for _, row in biased])], logits.device)
            logits.view(-1).index_add_(0, cells_, values)

    def _ban(self, logits: Tensor) -> None:
        each = zip(self.places, self.rows, self.positions, strict=True)
        cells = np.concatenate([place * logits.shape[1] + row.banned_at(position) for place, row, position in each])
        if len(cells):
            [cells_] = send([cells], logits.device)
            logits.view(-1).index_fill_(0, cells_, -torch.inf)


class LogitRules:
    """The rules of all rows; a row without any costs nothing."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, _Row] = {}
        self._penalties: _Penalties | None = None

    def start(self, starts: list[RowStart]) -> None:
        """Rows change their owners."""
        for start in starts:
            self._rows.pop(start.row, None)
            if start.params.changes_logits:
                self._rows[start.row] = _Row.of(start, self._vocab_size, self._device)
            if start.params.has_penalties:
                if self._penalties is None:
                    self._penalties = _Penalties.make(self._num_rows, self._vocab_size, self._device)
                self._penalties.start(start)

    def step(self, host_rows: list[int], host_positions: list[int]) -> StepRules | None:
        """What is to be done to the logits of these rows, whose new ids will stand at these positions."""
        if not self._rows:
            return None
        places = [place for place, row in enumerate(host_rows) if row in self._rows]
        if not places:
            return None
        return StepRules(
            places=places,
            rows=[self._rows[host_rows[place]] for place in places],
            positions=[host_positions[place] for place in places],
            penalties=self._penalties,
            penalised=self._penalised(places, host_rows),
        )

    def _penalised(self, places: list[int], host_rows: list[int]) -> tuple[Tensor, Tensor] | None:
        chosen = [place for place in places if self._rows[host_rows[place]].params.has_penalties]
        if not chosen:
            return None
        rows = np.array([host_rows[place] for place in chosen], dtype=np.int64)
        places_, rows_ = send([np.array(chosen, dtype=np.int64), rows], self._device)
        return places_, rows_
