"""Matrix products with the weights [out, in] of the converted checkpoint."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Module):
    """y = x W^T (+ b) for x [num_tokens, in]."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_out), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return _cpu_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


def _cpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # W x^T streams the weights about twice as fast as x W^T for the few rows of a decode (docs/benchmarks.md).
    y = torch.mm(weight, x.t()).t()
    return y if bias is None else y + bias
