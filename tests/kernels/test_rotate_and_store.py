import pytest
import torch

from tests.kernels.compare import assert_close, nans, random
from tests.kernels.implementations import ModuleType, both


@both
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim"), [(1, 1, 16), (6, 2, 64), (7, 1, 80), (32, 8, 128)]
)
def test_queries_are_rotated_and_rows_land_in_their_slots_and_nowhere_else(
    kernels: ModuleType,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(0)
    num_blocks, num_tokens, half = 3, 7, head_dim // 2
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = (nans(*shape, dtype=dtype, device=device) for _ in range(2))
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens].to(device)
    heads = random(generator, num_tokens, num_q_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device)
    angles = random(generator, num_tokens, half, dtype=torch.float32, device=device)
    first, second = heads.double()[..., :half], heads.double()[..., half:]
    cos, sin = angles.cos(), angles.sin()
    cos_, sin_ = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    rotated = torch.cat((first * cos_ - second * sin_, second * cos_ + first * sin_), dim=-1)
    v = heads[:, num_q_heads + num_kv_heads :].clone()
    kernels.rotate_and_store(heads, cos, sin, k_cache, v_cache, slots)
    assert_close("q", heads[:, :num_q_heads], rotated[:, :num_q_heads], dtype)
    assert_close("k", k_cache.flatten(0, 1)[slots], rotated[:, num_q_heads : num_q_heads + num_kv_heads], dtype)
    assert torch.equal(v_cache.flatten(0, 1)[slots], v)
    for cache in (k_cache, v_cache):
        untouched = cache.flatten(0, 1).isnan().all(dim=-1).all(dim=-1)
        assert int(untouched.sum()) == num_blocks * block_size - num_tokens
