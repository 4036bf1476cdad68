"""What the runner and the start of an engine need of every model."""

from torch import Tensor, nn

from limpet.backend.cache_layout import CacheLayout
from limpet.backend.layers.linear import Linear
from limpet.backend.ranks.group import RankGroup


class CausalLM(nn.Module):
    """`forward` maps ids and positions [num_tokens], the layers' caches and the step to hidden states.

    `ranks` are those that share it; each has a part of the vocabulary, and in `cache_layout` its own heads.
    """

    captures_prefills = False  # steps with prefills can be captured: nothing on the host depends on lengths
    ranks: RankGroup
    vocab_size: int
    cache_layout: CacheLayout
    lm_head: Linear

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden] -> logits [num_rows, vocab]."""
        return self.ranks.gather_columns(self.lm_head(hidden), self.vocab_size)
