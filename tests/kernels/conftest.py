"""Where the kernel tests run: natively on a GPU if there is one, else in Triton's interpreter on the CPU.

Triton decides when it is imported (tests/conftest.py), so a process has one of both; the other's tests are skipped.
"""

import os
from typing import Any

import numpy as np
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


@pytest.fixture
def rowwise_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter adds up every element of a tile's product alike, as a GPU does; numpy's order varies in a tile.

    Only for what is interpreted: a GPU's tests may use the fixture too.
    """
    if INTERPRETED:

        def matmul(a: Any, b: Any, dtype: Any) -> Any:
            return (a[:, None, :].astype(dtype) * np.ascontiguousarray(b.T)[None].astype(dtype)).sum(-1)

        monkeypatch.setattr(np, "matmul", matmul)
