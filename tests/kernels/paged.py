"""Paged caches for tests: shuffled blocks, NaN in every slot that holds no position of a sequence."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.kernels.compare import nans, random


@dataclass(frozen=True)
class PagedCache:
    """Sequences of some lengths in a cache, and the same keys and values laid out densely."""

    k_cache: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim_qk]
    v_cache: Tensor
    block_tables: Tensor  # [num_seqs, max_blocks] int32
    kv_lens: Tensor  # [num_seqs] int32
    keys: list[Tensor]  # [kv_len, num_kv_heads, head_dim_qk] of each sequence
    values: list[Tensor]


def paged_cache(
    generator: torch.Generator,
    kv_lens: list[int],
    num_kv_heads: int,
    head_dims: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> PagedCache:
    needed = [-(-length // block_size) for length in kv_lens]
    num_blocks = sum(needed) + 3  # some belong to nobody
    order = torch.randperm(num_blocks, generator=generator).tolist()
    foreign = order.pop()
    tables = torch.full((len(kv_lens), max(needed) + 2), foreign, dtype=torch.int32)
    keys = [random(generator, length, num_kv_heads, head_dims[0], dtype=dtype, device=device) for length in kv_lens]
    values = [random(generator, length, num_kv_heads, head_dims[1], dtype=dtype, device=device) for length in kv_lens]
    caches = [nans(num_blocks, block_size, num_kv_heads, dim, dtype=dtype, device=device) for dim in head_dims]
    for row, (length, count) in enumerate(zip(kv_lens, needed, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(blocks)
        slots = torch.cat([torch.arange(block * block_size, (block + 1) * block_size) for block in blocks])[:length]
        for cache, rows in zip(caches, (keys[row], values[row]), strict=True):
            cache.flatten(0, 1)[slots.to(device)] = rows
    lengths = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    return PagedCache(caches[0], caches[1], tables.to(device), lengths, keys, values)


def naive_attention(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Float64 attention of the last q.shape[0] positions: q [q_len, num_heads, dim] -> [q_len, num_heads, dim_v]."""
    q, keys, values = q.double(), keys.double(), values.double()
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(keys.shape[0] - q.shape[0] + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(dim=-1), values)
