import pytest
import torch

from tests.kernels.compare import assert_close, nans, random
from tests.kernels.implementations import ModuleType, both


@both
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 8), (3, 1536), (5, 1111), (2, 1024)])
def test_gate_times_up(
    kernels: ModuleType, num_tokens: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    gate_up = 3 * random(torch.Generator().manual_seed(0), num_tokens, 2 * size, dtype=dtype, device=device)
    gate, up = gate_up.double().chunk(2, dim=-1)
    out = kernels.silu_and_mul(gate_up, out=nans(num_tokens, size, dtype=dtype, device=device))
    assert_close("out", out, gate / (1 + torch.exp(-gate)) * up, dtype)
