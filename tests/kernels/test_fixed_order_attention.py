"""Fixed-order attention is right, and gives a token the same bits however its step is composed."""

import pytest
import torch

from limpet.kernels import fixed_order_attention
from limpet.kernels.fixed_order_attention import (
    PIECE_LEN,
    fixed_order_decode_attention,
    fixed_order_prefill_attention,
    pick_num_shares,
)
from tests.kernels.compare import assert_close, nans, random
from tests.kernels.paged import PagedCache, naive_attention, paged_cache

SCALE = 0.11


def prefill(q: torch.Tensor, cache: PagedCache, seq: int, first: int, count: int) -> torch.Tensor:
    """Outputs of positions first … first + count - 1 of sequence `seq`, computed as one chunk."""
    device, kv_len = q.device, first + count
    cu_q_lens, kv_lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, count], [kv_len]))
    out = nans(count, *q.shape[1:], dtype=q.dtype, device=device)
    tables = cache.block_tables[seq : seq + 1]
    fixed_order_prefill_attention(
        q[first:kv_len], cache.k_cache, cache.v_cache, tables, cu_q_lens, kv_lens, count, SCALE, out=out
    )
    return out


@pytest.mark.usefixtures("rowwise_products")
@pytest.mark.filterwarnings("ignore:invalid value")  # of rows that see nothing of a piece
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (7, 1)], ids=str)
def test_any_form_gives_the_same_right_bits(
    heads: tuple[int, int], dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed_order_attention, "PIECE_LEN", 64)
    kv_lens, dim = [150, 1, 64], 32
    generator = torch.Generator().manual_seed(0)
    cache = paged_cache(generator, kv_lens, heads[1], (dim, dim), 16, dtype, device)
    queries = [random(generator, length, heads[0], dim, dtype=dtype, device=device) for length in kv_lens]
    whole = [prefill(q, cache, seq, 0, len(q)) for seq, q in enumerate(queries)]
    for seq, q in enumerate(queries):
        assert_close(
            f"sequence {seq}", whole[seq], naive_attention(q, cache.keys[seq], cache.values[seq], SCALE), dtype
        )
    for first, count in ((140, 10), (63, 70), (149, 1)):
        assert torch.equal(prefill(queries[0], cache, 0, first, count), whole[0][first : first + count])
    last = torch.stack([q[-1] for q in queries])
    assert pick_num_shares(3 * heads[1], 3, 8) > 1
    for seqs in ([0, 1, 2], [2, 0] * 12):  # with several programs a sequence, and with one
        out = nans(len(seqs), heads[0], dim, dtype=dtype, device=device)
        fixed_order_decode_attention(
            last[seqs], cache.k_cache, cache.v_cache, cache.block_tables[seqs], cache.kv_lens[seqs], SCALE, out=out
        )
        assert torch.equal(out, torch.stack([whole[seq][-1] for seq in seqs]))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 32), (32, 8), (28, 4)], ids=str)
def test_long_sequences(heads: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    kv_len, dim = 5 * PIECE_LEN + 77, 128
    generator = torch.Generator().manual_seed(0)
    cache = paged_cache(generator, [kv_len], heads[1], (dim, dim), 64, dtype, device)
    q = random(generator, kv_len, heads[0], dim, dtype=dtype, device=device)
    whole = prefill(q, cache, 0, 0, kv_len)
    assert_close("prefill", whole, naive_attention(q, cache.keys[0], cache.values[0], SCALE), dtype)
    assert torch.equal(prefill(q, cache, 0, 1000, 300), whole[1000:1300])
    for num_seqs in (1, 2, 5, 64):
        out = fixed_order_decode_attention(
            q[-1:].expand(num_seqs, -1, -1),
            cache.k_cache,
            cache.v_cache,
            cache.block_tables.expand(num_seqs, -1).contiguous(),
            cache.kv_lens.expand(num_seqs).contiguous(),
            SCALE,
        )
        assert torch.equal(out, whole[-1:].expand_as(out)), f"{num_seqs} sequences"


def test_programs_share_a_sequence_where_few_would_run() -> None:
    assert pick_num_shares(num_programs=32, max_pieces=8, num_multiprocessors=132) == 8
    assert pick_num_shares(num_programs=64, max_pieces=64, num_multiprocessors=132) == 4
    assert pick_num_shares(num_programs=8192, max_pieces=64, num_multiprocessors=132) == 1
