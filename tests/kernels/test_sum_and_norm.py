"""One rank's kernel with what the others send already there; on a GPU, ranks that wait for each other, too."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from limpet.kernels.sum_and_norm import MAX_PROGRAMS, Mailboxes, sum_and_norm
from tests.kernels.compare import assert_close, random

EPS = 1e-5
SIZE = 48  # of a row: not a power of two
CAPACITY = 3 * MAX_PROGRAMS * SIZE


@dataclass
class Ranks:
    """All ranks' mailboxes, on one device."""

    slots: list[Tensor]
    flags: list[Tensor]
    mailboxes: list[Mailboxes]

    @classmethod
    def of(cls, size: int, dtype: torch.dtype, device: torch.device, num_earlier_calls: int = 0) -> "Ranks":
        slots = [torch.zeros(2, size, CAPACITY, dtype=dtype, device=device) for _ in range(size)]
        counts = torch.full((2 * size, size, MAX_PROGRAMS), num_earlier_calls, dtype=torch.int32, device=device)
        flags, calls = list(counts[:size]), counts[size:, 0]
        addresses = [torch.tensor([each.data_ptr() for each in of], device=device) for of in (slots, flags)]
        mailboxes = [Mailboxes(rank, size, CAPACITY, *addresses, calls[rank]) for rank in range(size)]
        return cls(slots, flags, mailboxes)


def expected(parts: list[Tensor], residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The residual, and its norm in float64."""
    total = torch.stack(parts).float().sum(0).to(residual.dtype)
    added = (residual.float() + total.float()).to(residual.dtype).double()
    return added, added / (added.pow(2).mean(dim=-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize(("size", "num_earlier_calls"), [(2, 2**31 - 3), (4, 0)])
def test_calls_of_one_rank(size: int, num_earlier_calls: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    ranks = Ranks.of(size, dtype, device, num_earlier_calls)
    own = ranks.mailboxes[size - 1]
    weight = random(generator, SIZE, dtype=dtype, device=device)
    for number, num_rows in enumerate((1, 5, MAX_PROGRAMS + 3, 2), num_earlier_calls + 1):
        call = (number + 2**31) % 2**32 - 2**31
        *others, x = (random(generator, num_rows, SIZE, dtype=dtype, device=device) for _ in range(size))
        residual = random(generator, num_rows, SIZE, dtype=dtype, device=device)
        for rank, part in enumerate(others):
            ranks.slots[own.rank][call & 1, rank, : part.numel()] = part.flatten()
            ranks.flags[own.rank][rank, :num_rows] = call
        total, normed = expected([*others, x], residual, weight)
        out = sum_and_norm(x, residual, weight, EPS, own)
        assert_close("residual", residual, total, dtype)
        assert_close("out", out, normed, dtype)
        assert (own.calls == call).all()
        for rank in range(size - 1):
            assert torch.equal(ranks.slots[rank][call & 1, own.rank, : x.numel()], x.flatten())
            assert (ranks.flags[rank][own.rank, :num_rows] == call).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_wait_for_each_other(size: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    ranks = Ranks.of(size, dtype, device)
    weight = random(generator, SIZE, dtype=dtype, device=device)
    streams = [torch.cuda.Stream() for _ in range(size)]
    calls = []
    for num_rows in [1, 7, 16, 3] * 50:
        parts = [random(generator, num_rows, SIZE, dtype=dtype, device=device) for _ in range(size)]
        calls.append((parts, random(generator, num_rows, SIZE, dtype=dtype, device=device)))
    # Loading a kernel may wait for those that run: each is loaded before one waits for it.
    ahead = Ranks.of(size, dtype, device)
    for rank, own in enumerate(ahead.mailboxes):
        ahead.flags[rank].fill_(1)
        sum_and_norm(calls[0][0][rank], calls[0][1].clone(), weight, EPS, own)
    torch.cuda.synchronize()
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(size)]
    for parts, residual in calls:
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                added = residual.clone()
                out = sum_and_norm(parts[rank], added, weight, EPS, ranks.mailboxes[rank])
                found[rank].append((added, out))
    torch.cuda.synchronize()
    for number, (parts, residual) in enumerate(calls):
        total, normed = expected(parts, residual, weight)
        for each in found:
            assert_close("residual", each[number][0], total, dtype)
            assert_close("out", each[number][1], normed, dtype)
            assert torch.equal(each[number][1], found[0][number][1])
