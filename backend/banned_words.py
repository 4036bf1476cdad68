"""Token sequences that an answer must not contain: the last id of one is banned where the ids before it stand."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from limpet.backend.staging import send

_ANY = -1  # stands in front of shorter words


class BannedWords:
    """One row's words of two and more ids, and as many of the row's last ids as they look back at, on the device.

    `tokens` are the row's ids so far, the prompt included: a word that the prompt has begun is not completed.
    """

    def __init__(self, words: Sequence[Sequence[int]], tokens: Sequence[int], device: torch.device) -> None:
        reach = max(len(word) for word in words) - 1
        prefixes = [[_ANY] * (reach + 1 - len(word)) + list(word[:-1]) for word in words]
        recent = [-2] * max(reach - len(tokens), 0) + list(tokens[-reach:])
        self._prefixes, self._lasts, self._recent = send(
            [
                np.array(prefixes, dtype=np.int64).ravel(),
                np.array([word[-1] for word in words], dtype=np.int64),
                np.array(recent, dtype=np.int64),
            ],
            device,
        )
        self._prefixes = self._prefixes.view(len(words), reach)

    def ban(self, logits: Tensor) -> None:
        """Make minus infinity, in place, what would complete a word; logits [vocab]."""
        begun = ((self._prefixes == self._recent) | (self._prefixes == _ANY)).all(dim=1)  # [num_words]
        logits.index_add_(0, self._lasts, torch.zeros_like(begun, dtype=logits.dtype).masked_fill_(begun, -torch.inf))

    def add(self, token: Tensor) -> None:
        """The row's next id, [1]."""
        self._recent = torch.cat((self._recent[1:], token))
