"""Row orders of sources that differ from the converted model's."""

import torch

from limpet.backend.checkpoint import ModelConfig


def query_half_split(tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Query rows of interleaved rotary pairs (2i, 2i + 1), as in GGUF and Meta files, to half-split pairs."""
    return half_split_pairs(tensor, config.num_heads)


def key_half_split(tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """The same for key rows, of which there are fewer heads."""
    return half_split_pairs(tensor, config.num_kv_heads)


def half_split_pairs(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of `num_heads` heads in interleaved rotary pairs to half-split pairs."""
    half_dim = tensor.shape[0] // num_heads // 2
    pairs = tensor.reshape(num_heads, half_dim, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def ungroup_qkv(tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """InternLM2's fused rows (for each K/V head: its query heads, its key, its value) to q, k, v rows."""
    group = config.num_heads // config.num_kv_heads
    rest = tensor.shape[1:]
    heads = tensor.reshape(config.num_kv_heads, group + 2, config.head_dim, *rest)
    query, key, value = heads[:, :group], heads[:, group], heads[:, group + 1]
    return torch.cat([part.reshape(-1, *rest) for part in (query, key, value)])
