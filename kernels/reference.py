"""Torch twins of the kernels: same signatures, any device. The CPU engine runs on them.

Cache layout for all of them: k_cache [num_blocks, block_size, num_kv_heads, head_dim_qk], v_cache [num_blocks,
block_size, num_kv_heads, head_dim_v]. A sequence's position p stands in block block_table[p // block_size], slot
p % block_size. Slots that hold no position of the sequence may contain anything, NaN included.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Root-mean-square norm over the last dimension, after adding `x` to `residual` in place if one is given.

    Zhang and Sennrich 2019: x / sqrt(mean(x^2) + eps) * weight, computed in float32.
    """
    if residual is not None:
        x = residual.add_(x)
    if x.dtype == torch.float32:
        y = F.rms_norm(x, (x.shape[-1],), weight, eps)
    else:
        y = F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)
    return y if out is None else out.copy_(y)


def apply_rotary(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads [num_tokens, num_heads, head_dim] in place; cos and sin [num_tokens, rotary_dim / 2] in float32.

    Su et al. 2021 in the half-split order: element i pairs with element i + rotary_dim / 2. Elements past rotary_dim
    stay as they are.
    """
    half = cos.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    first.copy_(rotated_first)
    second.copy_(rotated_second)


def silu_and_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up for gate_up [num_tokens, 2 * intermediate] = gate columns, then up columns."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.mul(F.silu(gate), up, out=out)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write k [num_tokens, num_kv_heads, head_dim_qk] and v into the cache; slots [num_tokens] int64."""
    k_cache.flatten(0, 1).index_copy_(0, slots, k)
    v_cache.flatten(0, 1).index_copy_(0, slots, v)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one new token per sequence over its cached positions, its own included.

    q [num_seqs, num_heads, head_dim_qk], block_tables [num_seqs, max_blocks] and kv_lens [num_seqs] in int32; returns
    [num_seqs, num_heads, head_dim_v]. Sequences of similar length are computed together, padded to the longest.
    """
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[-1]) if out is None else out
    block_size = k_cache.shape[1]
    lengths = kv_lens.tolist()
    for rows in _length_groups(lengths):
        longest = max(lengths[row] for row in rows)
        tables = block_tables[rows, : -(-longest // block_size)]
        out[rows] = _padded_decode(q[rows], k_cache, v_cache, tables, kv_lens[rows], scale)
    return out


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_q_lens: Tensor,
    kv_lens: Tensor,
    max_q_len: int,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last tokens of each sequence over its cached positions, their own included.

    q [num_tokens, num_heads, head_dim_qk], sequence after sequence: sequence i has the tokens cu_q_lens[i] …
    cu_q_lens[i + 1] - 1, at most `max_q_len` of them, which are the last of its kv_lens[i] positions. block_tables
    [num_seqs, max_blocks], cu_q_lens [num_seqs + 1] and kv_lens [num_seqs] are int32. Returns [num_tokens, num_heads,
    head_dim_v].
    """
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[-1]) if out is None else out
    starts = cu_q_lens.tolist()
    for index, kv_len in enumerate(kv_lens.tolist()):
        tokens = slice(starts[index], starts[index + 1])
        blocks = block_tables[index, : -(-kv_len // k_cache.shape[1])]
        k = k_cache.index_select(0, blocks).flatten(0, 1)[:kv_len]  # [kv_len, num_kv_heads, head_dim]
        v = v_cache.index_select(0, blocks).flatten(0, 1)[:kv_len]
        out[tokens] = _causal_attention(q[tokens], k, v, scale)
    return out


def _causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q_len, kv_len = q.shape[0], k.shape[0]
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, length, head_dim]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    if q_len == kv_len:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device).tril_(kv_len - q_len)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.squeeze(0).transpose(0, 1)


def _padded_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    flat = block_tables.flatten()
    k = k_cache.index_select(0, flat).view(num_seqs, -1, num_kv_heads, k_cache.shape[-1])
    v = v_cache.index_select(0, flat).view(num_seqs, -1, num_kv_heads, v_cache.shape[-1])
    beyond = torch.arange(k.shape[1], device=q.device) >= lengths.unsqueeze(1)  # [num_seqs, padded length]
    k.masked_fill_(beyond[:, :, None, None], 0)
    v.masked_fill_(beyond[:, :, None, None], 0)
    grouped = q.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    mask = torch.zeros(num_seqs, 1, 1, k.shape[1], dtype=q.dtype, device=q.device)
    mask.masked_fill_(beyond[:, None, None], float("-inf"))
    out = F.scaled_dot_product_attention(grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    return out.reshape(num_seqs, num_heads, v.shape[-1])


def _length_groups(lengths: list[int]) -> list[list[int]]:
    """Rows by size class: within a group the longest is less than twice the shortest, or all are short."""
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        groups.setdefault(max(length, 256).bit_length(), []).append(row)
    return list(groups.values())
