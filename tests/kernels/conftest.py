"""Where the kernel tests run: natively on a GPU if there is one, else in Triton's interpreter on the CPU.

Triton decides when it is imported (tests/conftest.py), so a process has one of both; the other's tests are skipped.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if (request.param == "interpreter") != INTERPRETED:
        pytest.skip("this process runs kernels on the GPU" if not INTERPRETED else "this process interprets kernels")
    return torch.device("cpu" if INTERPRETED else "cuda")


# The interpreter multiplies bfloat16 matrices wrongly.
@pytest.fixture(params=["float32", "float16", pytest.param("bfloat16", marks=pytest.mark.gpu)])
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    wanted: torch.dtype = getattr(torch, request.param)
    return wanted
