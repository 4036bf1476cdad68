"""Token embedding."""

from torch import Tensor, nn
from torch.nn import functional as F

from limpet.backend.layers.norm import sum_for_norm
from limpet.backend.layers.weight import Weight
from limpet.backend.ranks.group import RankGroup


class Embedding(nn.Module):
    """ids [num_tokens] -> [num_tokens, hidden], for a HiddenNorm; each rank has its part of the vocabulary."""

    def __init__(self, ranks: RankGroup, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self._ranks = ranks
        self._ids = ranks.padded_part(vocab_size)
        self.weight = Weight(vocab_size, hidden_size, parts={0: [self._ids]})

    def forward(self, ids: Tensor) -> Tensor:
        if self._ranks.size == 1:
            return F.embedding(ids, self.weight)
        others = (ids < self._ids.start) | (ids >= self._ids.stop)
        x = F.embedding((ids - self._ids.start).masked_fill_(others, 0), self.weight)
        return sum_for_norm(self._ranks, x.masked_fill_(others.unsqueeze(1), 0))
