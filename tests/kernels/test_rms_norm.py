import pytest
import torch

from tests.kernels.compare import assert_close, nans, random
from tests.kernels.implementations import ModuleType, both


def naive(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()


@both
@pytest.mark.parametrize("shape", [(1, 64), (3, 576), (7, 1000), (2, 4096)])
def test_norm_of_the_sum_with_the_residual(
    kernels: ModuleType, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = (random(generator, *shape, dtype=dtype, device=device) for _ in range(2))
    weight = random(generator, shape[1], dtype=dtype, device=device)
    total = (x.float() + residual.float()).to(dtype)
    out = kernels.rms_norm(x, weight, 1e-5, residual, out=nans(*shape, dtype=dtype, device=device))
    assert_close("residual", residual, total, dtype)
    assert_close("out", out, naive(total, weight, 1e-5), dtype)


@both
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), [(1, 1, 16), (5, 3, 64), (4, 8, 128), (3, 5, 80)])
def test_norm_of_heads_inside_a_wider_tensor(
    kernels: ModuleType, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(1)
    wide = random(generator, num_tokens, num_heads + 4, head_dim, dtype=dtype, device=device)
    weight = random(generator, head_dim, dtype=dtype, device=device)
    before = wide.clone()
    heads = wide[:, 1 : 1 + num_heads]
    out = kernels.rms_norm(heads, weight, 1e-6)
    assert_close("out", out, naive(heads, weight, 1e-6), dtype)
    kernels.rms_norm(heads, weight, 1e-6, out=heads)
    assert_close("in place", heads, out, dtype)
    assert torch.equal(wide[:, 0], before[:, 0])
    assert torch.equal(wide[:, 1 + num_heads :], before[:, 1 + num_heads :])
