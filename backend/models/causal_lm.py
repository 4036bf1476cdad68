"""What the runner and the start of an engine need of every model."""

from torch import Tensor, nn

from limpet.backend.cache_layout import CacheLayout
from limpet.backend.layers.linear import Linear


class CausalLM(nn.Module):
    """`forward` maps ids and positions [num_tokens], the layers' caches and the step to hidden states."""

    captures_prefills = False  # steps with prefills can be captured: nothing on the host depends on lengths
    cache_layout: CacheLayout
    lm_head: Linear

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden] -> logits [num_rows, vocab]."""
        logits: Tensor = self.lm_head(hidden)
        return logits
