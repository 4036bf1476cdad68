"""Root-mean-square norm."""

from torch import Tensor, nn

from limpet.backend.layers.device_kernels import kernels_for
from limpet.backend.layers.weight import Weight
from limpet.backend.ranks.group import RankGroup


class RMSNorm(nn.Module):
    """Norm over the last dimension; with `residual` the input is first added to it in place."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = Weight(size)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return kernels_for(x.device).rms_norm(x, self.weight, self.eps, residual)


class HiddenNorm(RMSNorm):
    """Norm of hidden states, which every rank has, after a layer that has left each rank its part of a sum."""

    def __init__(self, ranks: RankGroup, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self._ranks = ranks

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [num_tokens, size] is what `sum_for_norm` gave; it is added to `residual` in place."""
        if residual is not None and self._ranks.norm_adds(x):
            return self._ranks.add_and_norm(x, residual, self.weight, self.eps)
        return super().forward(x, residual)


def sum_for_norm(ranks: RankGroup, x: Tensor) -> Tensor:
    """The sum of all ranks' x [num_tokens, size], unless the HiddenNorm that follows adds them up."""
    return x if ranks.norm_adds(x) else ranks.all_reduce(x)
