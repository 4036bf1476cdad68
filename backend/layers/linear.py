"""Matrix products with the weights [out, in] of the converted checkpoint."""

import torch
from torch import Tensor, nn

from limpet.backend.layers.device_kernels import kernels_for

_PACKED_FOR_ROWS = 8  # the layout of this row count is the quickest for 1 to 32 rows (docs/benchmarks.md)


class Linear(nn.Module):
    """y = x W^T (+ b) for x [num_tokens, in].

    With `fixed_order` a row's bits do not depend on the other rows, nor on how many there are (CUDA).
    """

    def __init__(self, num_in: int, num_out: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_out), requires_grad=False) if bias else None
        self.fixed_order = False
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Lay the loaded weight out as oneDNN reads it best, in place of `weight`: float32 on the CPU only."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _PACKED_FOR_ROWS)
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return y
        return kernels_for(x.device).linear(x, self.weight, self.bias, fixed_order=self.fixed_order)


def pack_linears(model: nn.Module) -> None:
    """Pack every Linear of a loaded float32 model, where this build of torch has oneDNN."""
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        for module in model.modules():
            if isinstance(module, Linear):
                module.pack()
