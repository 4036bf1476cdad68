"""A rank's place among the processes that share a model (tensor parallelism, Shoeybi et al. 2019), and what they say.

Every rank computes the same step on its part of the weights. Hidden states are the same on all of them after each
collective, and only rank 0 samples: its ids reach the others at the beginning of the next step.
"""

from collections.abc import Callable

from torch import Tensor

_PADDED_TO = 8  # rows of a vocabulary's part: what tensor cores multiply at once


class RankGroup:
    """`rank` of `size`; the collectives are for one rank alone, ConnectedGroup has those of several."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def part(self, count: int) -> range:
        """This rank's share of `count` things, which divide equally."""
        each, rest = divmod(count, self.size)
        assert rest == 0, f"{count} things do not divide by {self.size} ranks"
        return range(self.rank * each, (self.rank + 1) * each)

    def padded_part(self, count: int) -> range:
        """Like `part`, of so many more things that they divide."""
        if self.size == 1:
            return range(count)
        return self.part(-(-count // (self.size * _PADDED_TO)) * self.size * _PADDED_TO)

    def part_or_shared(self, count: int) -> range:
        """Like `part`; where there are more ranks than things, one that several ranks have."""
        if count >= self.size:
            return self.part(count)
        assert self.size % count == 0, f"{self.size} ranks do not divide by {count} things"
        first = self.rank * count // self.size
        return range(first, first + 1)

    @property
    def way_of_adding(self) -> str:
        """For the log."""
        return "nothing"

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, the same bits on every rank; `x` may be changed."""
        assert self.size == 1, "these ranks are not connected"
        return x

    def all_reduce_begun(self, x: Tensor) -> Callable[[], object]:
        """Like `all_reduce` in place, beside what is computed before the function that it returns is called."""
        assert self.size == 1, "these ranks are not connected"
        return lambda: None

    def norm_adds(self, x: Tensor) -> bool:
        """Whether the sum of all ranks' `x` is left to `add_and_norm`."""
        return False

    def add_and_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add the sum of all ranks' `x` [num_tokens, hidden] to `residual` in place; returns its norm."""
        raise NotImplementedError("ranks that leave no sum to a norm")

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor:
        """All ranks' x [num_rows, each] side by side, the first `num_columns` of them."""
        assert self.size == 1, "these ranks are not connected"
        return x

    def share(self, x: Tensor) -> None:
        """Overwrite every rank's `x` with rank 0's."""
        assert self.size == 1, "these ranks are not connected"

    def close(self) -> None:
        """Nothing is said any more."""


ALONE = RankGroup()
