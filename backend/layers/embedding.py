"""Token embedding."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Embedding(nn.Module):
    """ids [num_tokens] -> [num_tokens, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)
