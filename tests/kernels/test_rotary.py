import pytest
import torch

from tests.kernels.compare import assert_close, random
from tests.kernels.implementations import ModuleType, both


@both
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "head_dim", "rotary_dim"),
    [(1, 1, 8, 8), (5, 3, 64, 64), (3, 12, 128, 128), (4, 5, 80, 32)],
)
def test_pairs_turn_by_their_angle_and_the_rest_stays(
    kernels: ModuleType,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = random(generator, num_tokens, num_heads + 2, head_dim, dtype=dtype, device=device)
    before = wide.clone()
    angles = torch.randn(num_tokens, rotary_dim // 2, generator=generator, dtype=torch.float64)
    kernels.apply_rotary(wide[:, :num_heads], angles.cos().float().to(device), angles.sin().float().to(device))
    half = rotary_dim // 2
    x = before[:, :num_heads].double().cpu()
    turned = torch.complex(x[..., :half], x[..., half:rotary_dim]) * torch.exp(1j * angles)[:, None]
    expected = torch.cat((turned.real, turned.imag, x[..., rotary_dim:]), dim=-1)
    assert_close("heads", wide[:, :num_heads], expected, dtype)
    assert torch.equal(wide[:, num_heads:], before[:, num_heads:])
