import pytest
import torch

from tests.kernels.compare import nans, random
from tests.kernels.implementations import ModuleType, both


@both
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize(("num_kv_heads", "dim_qk", "dim_v"), [(1, 576, 512), (3, 64, 64), (8, 192, 128), (32, 80, 80)])
def test_rows_land_in_their_slots_and_nowhere_else(
    kernels: ModuleType,
    num_kv_heads: int,
    dim_qk: int,
    dim_v: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(0)
    num_blocks, num_tokens = 3, 7
    k_cache = nans(num_blocks, block_size, num_kv_heads, dim_qk, dtype=dtype, device=device)
    v_cache = nans(num_blocks, block_size, num_kv_heads, dim_v, dtype=dtype, device=device)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens].to(device)
    k = random(generator, num_tokens, num_kv_heads + 2, dim_qk, dtype=dtype, device=device)[:, 1:-1]
    v = random(generator, num_tokens, num_kv_heads, dim_v, dtype=dtype, device=device)
    kernels.store_kv(k, v, k_cache, v_cache, slots)
    for rows, cache in ((k, k_cache), (v, v_cache)):
        flat = cache.flatten(0, 1)
        assert torch.equal(flat[slots], rows)
        assert int(flat.isnan().all(dim=-1).all(dim=-1).sum()) == num_blocks * block_size - num_tokens
