"""Matrix products with the weights [out, in] of the converted checkpoint."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from limpet.backend.layers.device_kernels import kernels_for
from limpet.backend.layers.norm import sum_for_norm
from limpet.backend.layers.weight import Weight
from limpet.backend.ranks.group import RankGroup

_PACKED_FOR_ROWS = 8  # the layout of this row count is the quickest for 1 to 32 rows (docs/benchmarks.md)
_PIECES_FROM, _NUM_PIECES = 2048, 4  # rows of x; more than any CUDA graph has


class Linear(nn.Module):
    """y = x W^T (+ b) for x [num_tokens, in]; of W [out, in] the rows in `outs` and the columns in `ins`, or all.

    With `fixed_order` a row's bits do not depend on the other rows, nor on how many there are (CUDA).
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        *,
        bias: bool = False,
        outs: Sequence[range] | None = None,
        ins: range | None = None,
    ) -> None:
        super().__init__()
        rows = {} if outs is None else {0: outs}
        self.weight = Weight(num_out, num_in, parts=rows if ins is None else {**rows, 1: [ins]})
        self.bias = Weight(num_out, parts=rows) if bias else None
        self.fixed_order = False
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Lay the loaded weight out as oneDNN reads it best, in place of `weight`: float32 on the CPU only."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _PACKED_FOR_ROWS)
        self.weight = Weight(0)

    def forward(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.bias)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._packed is not None:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
            return y
        return kernels_for(x.device).linear(x, self.weight, bias, fixed_order=self.fixed_order)


class RowParallelLinear(Linear):
    """Each rank has its part of the inputs, and of W's columns; the sum over the ranks is the product."""

    def __init__(self, ranks: RankGroup, num_in: int, num_out: int, *, bias: bool = False) -> None:
        super().__init__(num_in, num_out, bias=bias, ins=ranks.part(num_in))
        self._ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, in / size] -> [num_tokens, out], for a HiddenNorm."""
        if self._ranks.size > 1 and len(x) >= _PIECES_FROM and x.is_cuda and self.bias is None and not self.fixed_order:
            y = x.new_empty(len(x), len(self.weight))
            if not self._ranks.norm_adds(y):
                return self._multiply_in_pieces(x, y)
        return sum_for_norm(self._ranks, self._multiply(x, self.bias if self._ranks.rank == 0 else None))

    def _multiply_in_pieces(self, x: Tensor, out: Tensor) -> Tensor:
        """While the ranks add one piece of the rows, the next one is computed."""
        sums = []
        for rows, products in zip(x.chunk(_NUM_PIECES), out.chunk(_NUM_PIECES), strict=True):
            torch.mm(rows, self.weight.t(), out=products)
            sums.append(self._ranks.all_reduce_begun(products))
        for wait in sums:
            wait()
        return out


def gate_up_proj(ranks: RankGroup, hidden: int, intermediate: int, *, bias: bool = False) -> Linear:
    """This rank's gate rows, then its up rows, of [2 * intermediate, hidden] = all gate rows, then all up rows."""
    part = ranks.part(intermediate)
    outs = [part, range(intermediate + part.start, intermediate + part.stop)]
    return Linear(hidden, 2 * intermediate, bias=bias, outs=outs)


def pack_linears(model: nn.Module) -> None:
    """Pack every Linear of a loaded float32 model, where this build of torch has oneDNN."""
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        for module in model.modules():
            if isinstance(module, Linear):
                module.pack()
