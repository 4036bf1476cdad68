import pytest
import torch

from tests.kernels.compare import assert_close, nans, random
from tests.kernels.implementations import ModuleType, both
from tests.kernels.paged import naive_attention, paged_cache

SCALE = 0.11


def check(
    kernels: ModuleType,
    q_lens: list[int],
    kv_lens: list[int],
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = paged_cache(generator, kv_lens, heads[1], head_dims, block_size, dtype, device)
    wide = random(generator, sum(q_lens), heads[0] + 2, head_dims[0], dtype=dtype, device=device)
    q = wide[:, : heads[0]]  # as in the model: heads of a fused projection
    cu_q_lens = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    out = nans(sum(q_lens), heads[0], head_dims[1], dtype=dtype, device=device)
    tables, lengths = cache.block_tables, cache.kv_lens
    kernels.prefill_attention(q, cache.k_cache, cache.v_cache, tables, cu_q_lens, lengths, max(q_lens), SCALE, out=out)
    for index, (queries, part) in enumerate(zip(q.split(q_lens), out.split(q_lens), strict=True)):
        expected = naive_attention(queries, cache.keys[index], cache.values[index], SCALE)
        assert_close(f"sequence {index}", part, expected, dtype)


@both
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_ragged_sequences_with_and_without_context(
    kernels: ModuleType, block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    check(kernels, [1, 40, 17, 3], [1, 40, 90, 131], (2, 1), (64, 64), block_size, dtype, device)


@both
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (9, 3), (7, 1), (16, 2), (128, 1)], ids=str)
def test_head_groups(kernels: ModuleType, heads: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    check(kernels, [5, 9], [37, 9], heads, (32, 32), 16, dtype, device)


@both
@pytest.mark.parametrize("head_dims", [(8, 8), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_head_sizes(kernels: ModuleType, head_dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    check(kernels, [40, 2], [47, 33], (2, 1), head_dims, 16, dtype, device)


@pytest.mark.gpu
@both
@pytest.mark.parametrize("heads", [(32, 32), (32, 8)], ids=str)
def test_long_sequences(kernels: ModuleType, heads: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    check(kernels, [2048, 500, 1], [2048, 3333, 1777], heads, (128, 128), 64, dtype, device)
