"""How a model's cache lies in memory: what one token leaves in every layer."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CacheLayout:
    """Each layer has `num_parts` tensors [num_blocks, block_size, *row_shape]: keys and values, or latents alone."""

    num_layers: int
    num_parts: int
    row_shape: tuple[int, ...]

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Of the whole cache: layers, parts, blocks, slots, a row's own dimensions."""
        return (self.num_layers, self.num_parts, num_blocks, block_size, *self.row_shape)

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        elements = torch.Size(self.shape(1, block_size)).numel()
        return elements * dtype.itemsize
