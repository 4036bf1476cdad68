import pytest
import torch
from torch import Tensor

from limpet.kernels.latent_decode_attention import MAX_SPLITS, pick_splits
from tests.kernels.compare import assert_close, nans, random
from tests.kernels.implementations import ModuleType, both
from tests.kernels.paged import naive_attention, paged_cache

SCALE = 0.13


def check_decode(
    kernels: ModuleType,
    kv_lens: list[int],
    num_heads: int,
    dims: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    rank, rope = dims
    generator = torch.Generator().manual_seed(0)
    cache = paged_cache(generator, kv_lens, 1, (rank + rope, 8), block_size, dtype, device)
    q = random(generator, len(kv_lens), num_heads + 2, rank + rope, dtype=dtype, device=device)[:, 1:-1]
    out = nans(len(kv_lens), num_heads, rank, dtype=dtype, device=device)
    latent_cache = cache.k_cache.squeeze(2)
    kernels.latent_decode_attention(q, latent_cache, cache.block_tables, cache.kv_lens, rank, SCALE, out=out)
    for index, rows in enumerate(cache.keys):
        expected = naive_attention(q[index : index + 1], rows, rows[..., :rank], SCALE)
        assert_close(f"sequence {index}", out[index : index + 1], expected, dtype)


@both
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_decode_of_ragged_lengths(
    kernels: ModuleType, block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_decode(kernels, [1, 130, 16, 63, 300], 16, (64, 16), block_size, dtype, device)


@both
@pytest.mark.parametrize("num_heads", [2, 16, 20, 128])
def test_decode_of_many_heads_over_one_row(
    kernels: ModuleType, num_heads: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_decode(kernels, [37, 70], num_heads, (32, 8), 16, dtype, device)


@both
@pytest.mark.parametrize("dims", [(512, 64), (40, 8), (96, 32)], ids=str)
def test_decode_of_row_sizes(
    kernels: ModuleType, dims: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    check_decode(kernels, [75, 33], 4, dims, 16, dtype, device)


@both
def test_decode_of_one_long_sequence_is_split(kernels: ModuleType, dtype: torch.dtype, device: torch.device) -> None:
    assert pick_splits(2, 640, num_multiprocessors=8)[0] > 2
    check_decode(kernels, [600, 1], 4, (32, 16), 32, dtype, device)


def test_splits_fill_the_device_and_serve_long_sequences_in_crowds() -> None:
    assert pick_splits(num_programs=1, max_kv_len=32768, num_multiprocessors=132) == (MAX_SPLITS, 32)
    assert pick_splits(num_programs=64, max_kv_len=32768, num_multiprocessors=132) == (17, 128)
    assert pick_splits(num_programs=256, max_kv_len=32768, num_multiprocessors=132) == (5, 512)
    assert pick_splits(num_programs=256, max_kv_len=512, num_multiprocessors=132)[0] == 1


@pytest.mark.gpu
@both
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("num_seqs", [1, 7, 40])
def test_decode_of_long_sequences(
    kernels: ModuleType, num_heads: int, num_seqs: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_decode(kernels, [1 + 997 * i % 4000 for i in range(num_seqs)], num_heads, (512, 64), 64, dtype, device)


def naive_with_lse(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Float64 attention and log2 of the sum of 2^score."""
    scores = torch.einsum("qhd,khd->qhk", q.double(), k.double()) * SCALE
    if is_causal:
        hidden = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
    out = torch.einsum("qhk,khd->qhd", scores.softmax(dim=-1), v.double())
    return out, scores.logsumexp(dim=-1) / torch.log(torch.tensor(2.0, dtype=torch.float64))


def check_expanded(
    kernels: ModuleType,
    q_lens: list[int],
    kv_lens: list[int],
    dims: tuple[int, int, int],
    is_causal: bool,
    dtype: torch.dtype,
    device: torch.device,
    num_heads: int = 3,
) -> None:
    nope, rope, v_dim = dims
    generator = torch.Generator().manual_seed(0)
    q = random(generator, sum(q_lens), num_heads + 1, nope + rope, dtype=dtype, device=device)[:, 1:]
    k = random(generator, sum(kv_lens), num_heads, nope, dtype=dtype, device=device)
    k_rope = random(generator, sum(kv_lens), rope + 5, dtype=dtype, device=device)[:, 5:]
    v = random(generator, sum(kv_lens), num_heads, v_dim, dtype=dtype, device=device)
    cu_q, cu_kv = (
        torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        for lens in (q_lens, kv_lens)
    )
    out = nans(sum(q_lens), num_heads, v_dim, dtype=dtype, device=device)
    _, lse = kernels.expanded_attention(q, k, k_rope, v, cu_q, cu_kv, max(q_lens), SCALE, is_causal, out=out)
    whole_k = torch.cat((k, k_rope[:, None].expand(-1, num_heads, -1)), dim=2)
    parts = (x.split(lens) for x, lens in ((q, q_lens), (whole_k, kv_lens), (v, kv_lens), (out, q_lens), (lse, q_lens)))
    for index, (queries, keys, values, y, sums) in enumerate(zip(*parts, strict=True)):
        if keys.shape[0] == 0:
            assert not y.any()
            assert bool((sums == float("-inf")).all())
            continue
        expected, expected_lse = naive_with_lse(queries, keys, values, is_causal)
        assert_close(f"sequence {index}", y, expected, dtype)
        assert_close(f"log-sum-exp {index}", sums, expected_lse, dtype)


@both
def test_causal_attention_of_ragged_sequences(kernels: ModuleType, dtype: torch.dtype, device: torch.device) -> None:
    lens = [2, 40, 17, 3, 70]
    check_expanded(kernels, lens, lens, (32, 16, 32), True, dtype, device)


@both
def test_attention_to_context_that_some_sequences_lack(
    kernels: ModuleType, dtype: torch.dtype, device: torch.device
) -> None:
    check_expanded(kernels, [5, 40, 2], [37, 0, 100], (32, 16, 32), False, dtype, device)


@both
@pytest.mark.parametrize("dims", [(128, 64, 128), (16, 8, 24)], ids=str)
def test_expanded_head_sizes(
    kernels: ModuleType, dims: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    check_expanded(kernels, [20, 5], [20, 5], dims, True, dtype, device)


@pytest.mark.gpu
@both
@pytest.mark.parametrize("is_causal", [True, False])
def test_long_expanded_sequences(
    kernels: ModuleType, is_causal: bool, dtype: torch.dtype, device: torch.device
) -> None:
    q_lens = [2048, 500, 1]
    check_expanded(
        kernels, q_lens, q_lens if is_causal else [3000, 0, 700], (128, 64, 128), is_causal, dtype, device, 16
    )


@both
def test_merged_attention_is_attention_over_all_keys(
    kernels: ModuleType, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    q = random(generator, 7, 3, 32, dtype=dtype, device=device)
    k, v = (random(generator, 50, 3, 32, dtype=dtype, device=device) for _ in range(2))
    out, lse = naive_with_lse(q, k[:20], v[:20], False)
    other, other_lse = naive_with_lse(q, k[20:], v[20:], False)
    wide = nans(7, 4, 32, dtype=dtype, device=device)
    merged, merged_lse = wide[:, :3], lse.float()
    merged.copy_(out)
    kernels.merge_attention(merged, merged_lse, other.to(dtype).contiguous(), other_lse.float())
    nothing = torch.full_like(merged_lse, float("-inf"))
    kernels.merge_attention(merged, merged_lse, torch.zeros(7, 3, 32, dtype=dtype, device=device), nothing)
    expected, expected_lse = naive_with_lse(q, k, v, False)
    assert_close("output", merged, expected, dtype)
    assert_close("log-sum-exp", merged_lse, expected_lse, dtype)


@both
@pytest.mark.parametrize("dims", [(512, 64), (40, 8)], ids=str)
def test_latent_rows_are_normalised_rotated_and_stored(
    kernels: ModuleType, dims: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    rank, rope = dims
    generator = torch.Generator().manual_seed(0)
    wide = random(generator, 5, 7 + rank + rope, dtype=dtype, device=device)
    before = wide.clone()
    weight = random(generator, rank, dtype=dtype, device=device)
    angles = torch.randn(5, rope // 2, generator=generator, dtype=torch.float64).to(device)
    cache = nans(3, 16, rank + rope, dtype=dtype, device=device)
    slots = torch.tensor([40, 3, 17, 0, 16], device=device)
    kernels.store_latents(wide[:, 7:], weight, 1e-6, angles.cos().float(), angles.sin().float(), cache, slots)
    x = before[:, 7:].double()
    latents = x[:, :rank] / (x[:, :rank].pow(2).mean(dim=1, keepdim=True) + 1e-6).sqrt() * weight.double()
    first, second = x[:, rank:].chunk(2, dim=1)
    turned = torch.complex(first, second) * torch.exp(1j * angles)
    expected = torch.cat((latents, turned.real, turned.imag), dim=1)
    assert_close("rows", wide[:, 7:], expected, dtype)
    assert torch.equal(wide[:, :7], before[:, :7])
    assert torch.equal(cache.flatten(0, 1)[slots], wide[:, 7:])
    assert int(cache.flatten(0, 1).isnan().all(dim=1).sum()) == 48 - 5


@both
@pytest.mark.parametrize("dims", [(128, 64, 512), (16, 8, 40)], ids=str)
def test_queries_are_absorbed_and_rotated(
    kernels: ModuleType, dims: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    nope, rope, rank = dims
    generator = torch.Generator().manual_seed(0)
    q = random(generator, 19, 5, nope + rope, dtype=dtype, device=device)[:, 1:4]
    w_uk = random(generator, 3, nope, rank, dtype=dtype, device=device)
    angles = torch.randn(19, rope // 2, generator=generator, dtype=torch.float64).to(device)
    out = nans(19, 3, rank + rope, dtype=dtype, device=device)
    kernels.absorb_queries(q, w_uk, angles.cos().float(), angles.sin().float(), out)
    first, second = q[..., nope:].double().chunk(2, dim=2)
    turned = torch.complex(first, second) * torch.exp(1j * angles)[:, None]
    latent = torch.einsum("thn,hnr->thr", q[..., :nope].double(), w_uk.double())
    assert_close("plain part", out[..., :rank], latent, dtype)
    assert_close("rotary part", out[..., rank:], torch.cat((turned.real, turned.imag), dim=2), dtype)


@both
@pytest.mark.parametrize("sizes", [(128, 512), (512, 128), (16, 40), (24, 8)], ids=str)
def test_a_product_for_each_head(
    kernels: ModuleType, sizes: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    ins, outs = sizes
    generator = torch.Generator().manual_seed(0)
    x = random(generator, 19, 3, ins + 8, dtype=dtype, device=device)[..., :ins]
    weight = random(generator, 3, outs, ins, dtype=dtype, device=device).transpose(1, 2)
    out = nans(19, 3, outs + 8, dtype=dtype, device=device)
    kernels.multiply_heads(x, weight, out[..., :outs])
    assert_close("out", out[..., :outs], torch.einsum("thi,hio->tho", x.double(), weight.double()), dtype)
    assert bool(out[..., outs:].isnan().all())
