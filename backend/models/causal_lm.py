"""What the runner and the start of an engine need of every model."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from limpet.backend.cache_layout import CacheLayout
from limpet.backend.checkpoint import ModelConfig
from limpet.backend.layers.embedding import Embedding
from limpet.backend.layers.linear import Linear
from limpet.backend.layers.norm import HiddenNorm
from limpet.backend.layers.rotary import Rotary
from limpet.backend.ranks.group import RankGroup


class CausalLM(nn.Module):
    """A decoder-only transformer: embedding, `layers`, norm and head; positions below `session_len`.

    `forward` of an architecture maps ids and positions [num_tokens], the layers' caches and the step to hidden states
    [num_tokens, hidden]. `ranks` are those that share it; each has a part of the vocabulary, and in `cache_layout` its
    own heads.
    """

    captures_prefills = False  # steps with prefills can be captured: nothing on the host depends on lengths
    cache_layout: CacheLayout

    def __init__(
        self, config: ModelConfig, layers: Sequence[nn.Module], session_len: int, device: torch.device, ranks: RankGroup
    ) -> None:
        super().__init__()
        self.ranks, self.vocab_size = ranks, config.vocab_size
        self.embed_tokens = Embedding(ranks, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = HiddenNorm(ranks, config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, outs=[ranks.padded_part(config.vocab_size)])
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = Rotary(config, session_len, device)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden] -> logits [num_rows, vocab]."""
        return self.ranks.gather_columns(self.lm_head(hidden), self.vocab_size)
