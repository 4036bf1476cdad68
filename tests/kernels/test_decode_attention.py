import pytest
import torch

from limpet.kernels.decode_attention import MAX_SPLITS, MIN_SPLIT_LEN, pick_num_splits
from tests.kernels.compare import assert_close, nans, random
from tests.kernels.implementations import ModuleType, both
from tests.kernels.paged import naive_attention, paged_cache

SCALE = 0.13


def check(
    kernels: ModuleType,
    kv_lens: list[int],
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = paged_cache(generator, kv_lens, heads[1], head_dims, block_size, dtype, device)
    wide = random(generator, len(kv_lens), heads[0] + 2, head_dims[0], dtype=dtype, device=device)
    q = wide[:, 1:-1]
    out = nans(len(kv_lens), heads[0], head_dims[1], dtype=dtype, device=device)
    kernels.decode_attention(q, cache.k_cache, cache.v_cache, cache.block_tables, cache.kv_lens, SCALE, out=out)
    for index in range(len(kv_lens)):
        expected = naive_attention(q[index : index + 1], cache.keys[index], cache.values[index], SCALE)
        assert_close(f"sequence {index}", out[index : index + 1], expected, dtype)


@both
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_ragged_lengths(kernels: ModuleType, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
    check(kernels, [1, 130, 16, 63, 300], (2, 1), (64, 64), block_size, dtype, device)


@both
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (9, 3), (16, 1), (20, 1), (71, 1), (128, 1)], ids=str)
def test_head_groups(kernels: ModuleType, heads: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    check(kernels, [37, 70], heads, (32, 32), 16, dtype, device)


@both
@pytest.mark.parametrize(
    "head_dims", [(8, 8), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (576, 512)], ids=str
)
def test_head_sizes(kernels: ModuleType, head_dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    check(kernels, [75, 33], (2, 1), head_dims, 16, dtype, device)


@both
def test_few_long_sequences_beside_a_short_one(kernels: ModuleType, dtype: torch.dtype, device: torch.device) -> None:
    assert pick_num_splits(2, 640, num_multiprocessors=8) > 2
    check(kernels, [600, 1], (2, 1), (32, 32), 32, dtype, device)


def test_splits_fill_the_device_and_no_more() -> None:
    assert pick_num_splits(num_programs=32, max_kv_len=32768, num_multiprocessors=132) == 17
    assert pick_num_splits(num_programs=8192, max_kv_len=32768, num_multiprocessors=132) == 1
    assert pick_num_splits(num_programs=1, max_kv_len=10**6, num_multiprocessors=132) == MAX_SPLITS
    assert pick_num_splits(num_programs=1, max_kv_len=3 * MIN_SPLIT_LEN, num_multiprocessors=132) == 3


@pytest.mark.gpu
@both
@pytest.mark.parametrize("heads", [(32, 32), (32, 8), (64, 8), (16, 1), (128, 1)], ids=str)
@pytest.mark.parametrize("num_seqs", [1, 7, 40])
def test_long_sequences(
    kernels: ModuleType, heads: tuple[int, int], num_seqs: int, dtype: torch.dtype, device: torch.device
) -> None:
    head_dims = (576, 512) if heads[1] == 1 else (128, 128)
    check(kernels, [1 + 997 * index % 4000 for index in range(num_seqs)], heads, head_dims, 64, dtype, device)
