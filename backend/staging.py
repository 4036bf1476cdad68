"""How numbers reach the device: every step's arrays in one pinned buffer and one copy that nobody waits for."""

from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array: TypeAlias = npt.NDArray[Any]

ALIGNMENT = 16  # bytes; Triton compiles a kernel anew for pointers that are aligned otherwise


def send(arrays: list[Array], device: torch.device, into: Tensor | None = None) -> list[Tensor]:
    """The arrays as tensors on `device`; on the CPU they share their memory.

    On CUDA they stand one after the other in one buffer: `into` (uint8, the same addresses for the same sizes), or a
    new one. The copy is queued on the current stream; torch's pinned allocator keeps the source until it has run.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    starts = list(accumulate(sizes, initial=0))
    source = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    target = torch.empty(starts[-1], dtype=torch.uint8, device=device) if into is None else into[: starts[-1]]
    pinned = source.numpy()
    for array, start in zip(arrays, starts, strict=False):
        pinned[start : start + array.nbytes] = array.view(np.uint8)
    target.copy_(source, non_blocking=True)
    return [
        target[start : start + array.nbytes].view(torch.from_numpy(array).dtype)
        for array, start in zip(arrays, starts, strict=False)
    ]
