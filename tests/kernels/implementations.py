"""Every kernel test runs on the Triton kernel and on its torch twin."""

from types import ModuleType

import pytest

from limpet.kernels import launchers, reference

both = pytest.mark.parametrize("kernels", [launchers, reference], ids=["triton", "twin"])

__all__ = ["ModuleType", "both"]
