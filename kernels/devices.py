"""What the pickers of meta-parameters ask about a device."""

from functools import cache

import torch


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 8 for the CPU, where Triton's interpreter runs."""
    if device.type != "cuda":
        return 8
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
