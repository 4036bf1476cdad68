"""How kernel results are compared: one error ratio over a whole tensor, and float64 references."""

import torch
from torch import Tensor

# Largest ||out - reference|| / ||reference||; float32 products are exact ones (no tf32).
TOLERANCES = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def assert_close(name: str, out: Tensor, reference: Tensor, dtype: torch.dtype) -> None:
    """`out`, computed in `dtype`, is the reference up to rounding; NaN is never close."""
    assert out.shape == reference.shape, f"{name} has shape {list(out.shape)}, expected {list(reference.shape)}"
    out, reference = out.detach().double().cpu(), reference.detach().double().cpu()
    num_nan = int(out.isnan().sum())
    assert num_nan == 0, f"{name}: {num_nan} of {out.numel()} elements are NaN"
    ratio = float((out - reference).norm() / reference.norm().clamp_min(1e-30))
    assert ratio <= TOLERANCES[dtype], f"{name} is off by {ratio:.2e} of its norm, {TOLERANCES[dtype]:.0e} is allowed"


def random(generator: torch.Generator, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers, the same ones on every device."""
    return torch.randn(*shape, generator=generator).to(device, dtype)


def nans(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)
