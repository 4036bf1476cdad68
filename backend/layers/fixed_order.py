"""Deterministic mode: the layers whose additions would else be ordered by what the step happens to hold."""

from torch import nn

from limpet.backend.layers.attention import PagedAttention
from limpet.backend.layers.experts import MixtureOfExperts
from limpet.backend.layers.latent_attention import LatentAttention
from limpet.backend.layers.linear import Linear


def fix_order(model: nn.Module) -> None:
    """A token's hidden state and logits have the same bits in any batch, chunking, and after any cache hit (CUDA).

    Norms, rotary embedding, gate, routing and sampling compute each row by itself anyway.
    """
    for module in model.modules():
        if isinstance(module, Linear | PagedAttention | LatentAttention | MixtureOfExperts):
            module.fixed_order = True
