"""Parameters, and which part of a checkpoint's tensor this rank's parameter holds."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

Parts: TypeAlias = Mapping[int, Sequence[range]]  # by dimension: ranges of the whole tensor, one after the other


class Piece(NamedTuple):
    """`target`, a view of the parameter, holds what the whole tensor has at `source`."""

    target: Tensor
    source: tuple[slice, ...]


class Weight(nn.Parameter):
    """Not initialised. Of a tensor of `whole_shape` it holds `parts`; dimensions that they leave out, whole.

    What a range has past the tensor's end is zero: a vocabulary that does not divide is padded. `stored_as` is the
    checkpoint's name where it is not the parameter's own, without the names of the modules around it.
    """

    whole_shape: tuple[int, ...]
    parts: Parts
    stored_as: str | None

    def __new__(cls, *whole_shape: int, parts: Parts | None = None, stored_as: str | None = None) -> "Weight":
        parts = parts or {}
        shape = [sum(map(len, parts[dim])) if dim in parts else size for dim, size in enumerate(whole_shape)]
        weight = super().__new__(cls, torch.empty(shape), requires_grad=False)
        weight.whole_shape, weight.parts, weight.stored_as = whole_shape, parts, stored_as
        return weight

    @property
    def is_whole(self) -> bool:
        return not self.parts

    @property
    def is_padded(self) -> bool:
        return any(part.stop > self.whole_shape[dim] for dim, parts in self.parts.items() for part in parts)

    def pieces(self) -> Iterator[Piece]:
        """What is to be copied from the checkpoint's tensor; with the padding it fills the parameter."""
        for chosen in product(*(self._ranges(dim) for dim in range(len(self.whole_shape)))):
            target = self.data
            for dim, (place, part) in enumerate(chosen):
                target = target.narrow(dim, place, len(part))
            if target.numel():
                yield Piece(target, tuple(slice(part.start, part.stop) for _, part in chosen))

    def _ranges(self, dim: int) -> Iterator[tuple[int, range]]:
        """Where each range begins in the parameter, and what of it the whole tensor has."""
        size, place = self.whole_shape[dim], 0
        for part in self.parts.get(dim, [range(size)]):
            yield place, range(min(part.start, size), min(part.stop, size))
            place += len(part)
