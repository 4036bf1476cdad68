"""Run one Triton kernel on the GPU and compare it with torch: `python -m limpet.backend.doctor.kernel_probe`."""

import torch

from limpet.kernels import reference
from limpet.kernels.rms_norm import rms_norm


def main() -> None:
    """Raises AssertionError if the result is wrong, or whatever Triton raises."""
    x, weight = torch.randn(4, 1024, device="cuda"), torch.randn(1024, device="cuda")
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


if __name__ == "__main__":
    main()
