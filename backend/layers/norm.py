"""Root-mean-square norm."""

from torch import Tensor, nn

from limpet.backend.layers.device_kernels import kernels_for
from limpet.backend.layers.weight import Weight


class RMSNorm(nn.Module):
    """Norm over the last dimension; with `residual` the input is first added to it in place."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = Weight(size)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return kernels_for(x.device).rms_norm(x, self.weight, self.eps, residual)
