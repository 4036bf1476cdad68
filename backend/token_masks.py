"""Which ids guided decoding allows in one step: bits from the host, applied to the logits on their device."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from limpet.backend.staging import Array, send

WORD_BITS = 32


@dataclass(frozen=True)
class TokenMasks:
    """`bits[i]` belongs to the sampled row `places[i]`: bit b of word w says whether id 32 w + b is allowed."""

    places: list[int]
    bits: Array  # [num_places, ceil(vocab / 32)] int32

    def apply(self, logits: Tensor) -> Tensor:
        """A copy of logits [num_sampled, vocab], minus infinity where an id is not allowed."""
        places, words = send([np.array(self.places, dtype=np.int64), self.bits.ravel()], logits.device)
        shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
        allowed = (words.view(len(self.places), -1, 1) >> shifts) & 1  # [num_places, words, 32]
        forbidden = allowed.flatten(1)[:, : logits.shape[1]] == 0
        masked = logits.clone(memory_format=torch.contiguous_format)
        return masked.index_copy_(0, places, logits[places].masked_fill_(forbidden, -torch.inf))
