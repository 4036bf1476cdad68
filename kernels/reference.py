"""Torch twins of the kernels: same signatures, any device. The CPU engine runs on them.

Cache layout for all of them: k_cache [num_blocks, block_size, num_kv_heads, head_dim_qk], v_cache [num_blocks,
block_size, num_kv_heads, head_dim_v]. A sequence's position p stands in block block_table[p // block_size], slot
p % block_size. Slots that hold no position of the sequence may contain anything, NaN included. Latent attention and
experts have files of their own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from limpet.kernels.reference_experts import mix_experts, route
from limpet.kernels.reference_latent import (
    absorb_queries,
    expanded_attention,
    latent_decode_attention,
    merge_attention,
    multiply_heads,
    store_latents,
)

__all__ = [
    "absorb_queries",
    "apply_rotary",
    "decode_attention",
    "expanded_attention",
    "fixed_order_decode_attention",
    "fixed_order_prefill_attention",
    "latent_decode_attention",
    "linear",
    "merge_attention",
    "mix_experts",
    "multiply_heads",
    "prefill_attention",
    "rms_norm",
    "rotate_and_store",
    "route",
    "sample",
    "silu_and_mul",
    "store_latents",
]

INVALID_ID = -1

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: step of splitmix64 (Steele et al. 2014)
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fixed_order: bool = False) -> Tensor:
    """x W^T (+ b) for x [num_rows, num_ins], weight [num_outs, num_ins], bias [num_outs]; [num_rows, num_outs].

    The order of additions is the library's here, whatever `fixed_order` says.
    """
    return F.linear(x, weight, bias)


def rotate_and_store(heads: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Rotate the queries of heads [num_tokens, q + k + v heads, head_dim] in place; keys (rotated) and values go into
    the cache. The keys of `heads` hold anything afterwards.

    cos and sin [num_tokens, head_dim / 2] are float32, slots [num_tokens] int64: block * block_size + offset.
    """
    num_kv_heads = k_cache.shape[2]
    apply_rotary(heads[:, :-num_kv_heads], cos, sin)
    k_cache.flatten(0, 1).index_copy_(0, slots, heads[:, -2 * num_kv_heads : -num_kv_heads])
    v_cache.flatten(0, 1).index_copy_(0, slots, heads[:, -num_kv_heads:])


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
    lengths = kv_lens.tolist()
    groups = _length_groups(lengths)
    for members in groups:
        if len(members) == 1:
            row = members[0]
            k, v = (_cached(cache, block_tables[row], lengths[row]) for cache in (k_cache, v_cache))
            out[row] = _single_decode(q[row], k, v, scale)
            continue
        rows = members if len(groups) > 1 else slice(None)
        longest = max(lengths[row] for row in members)
        out[rows] = _padded_decode(q[rows], k_cache, v_cache, block_tables[rows], kv_lens[rows], longest, scale)
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
    cu_q_lens[i + 1] - 1, at most `max_q_len` of them, which are the last of its kv_lens[i] positions; tokens that no
    sequence has are left out. block_tables [num_seqs, max_blocks], cu_q_lens [num_seqs + 1] and kv_lens [num_seqs] are
    int32. Returns [num_tokens, num_heads, head_dim_v].
    """
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[-1]) if out is None else out
    starts = cu_q_lens.tolist()
    for index, kv_len in enumerate(kv_lens.tolist()):
        tokens = slice(starts[index], starts[index + 1])
        k, v = (_cached(cache, block_tables[index], kv_len) for cache in (k_cache, v_cache))
        out[tokens] = _causal_attention(q[tokens], k, v, scale)
    return out


# The order of additions is the library's here.
fixed_order_decode_attention = decode_attention
fixed_order_prefill_attention = prefill_attention


def sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    draws: bool,
    filters: bool,
    out: Tensor | None = None,
) -> Tensor:
    """The next ids [num_sampled] int64 for logits [num_sampled, vocab]; INVALID_ID where a row's are not finite.

    `rows[i]` is where the settings of logits[i] stand in temperature (0: argmax), top_k (0: off), top_p, min_p and seed
    [num_rows]; positions[i] is where the new id will stand in its sequence. `draws`: some row's temperature is not 0;
    `filters`: some such row has a top-k, top-p or min-p. A draw is argmax(logits / temperature + Gumbel noise).
    """
    best, ids = logits.max(dim=-1)
    if draws:
        drawn = torch.nonzero(temperature[rows]).flatten()
        drawn_rows = rows[drawn]
        scaled = logits[drawn].float() / temperature[drawn_rows].unsqueeze(1)
        if filters:
            scaled = _filter(scaled, top_k[drawn_rows], top_p[drawn_rows], min_p[drawn_rows])
        noise = gumbel_noise(seed[drawn_rows], positions[drawn], logits.shape[1])
        ids[drawn] = (scaled + noise).argmax(dim=-1)
    ids.masked_fill_(~torch.isfinite(best), INVALID_ID)
    return ids if out is None else out.copy_(ids)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Noise [num_rows, vocab] keyed by (seed, position, id), each entry -log(-log(u)) for a uniform u of 23 bits."""
    keys = _mix(seeds + _mix(positions.to(torch.int64) * _GOLDEN + _GOLDEN))
    ids = torch.arange(vocab_size, dtype=torch.int64, device=seeds.device)
    bits = _mix(keys.unsqueeze(1) + ids * _GOLDEN) & 0x7FFFFF
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-23  # exact, so never 0 or 1
    return -torch.log(-torch.log(uniform))


def _filter(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Minus infinity for the ids that top-k, then top-p, then min-p exclude; the most likely id always stays."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    top_k = top_k.unsqueeze(1)
    ranks = torch.arange(logits.shape[1], device=logits.device)
    excluded = (ranks >= top_k) & (top_k > 0)
    probabilities = ordered.masked_fill(excluded, float("-inf")).softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    excluded |= mass_before >= top_p.unsqueeze(1)
    excluded |= probabilities < min_p.unsqueeze(1) * probabilities[:, :1]
    excluded[:, 0] = False
    return logits.masked_fill(torch.zeros_like(excluded).scatter_(1, order, excluded), float("-inf"))


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finalizer; int64 products wrap as the unsigned ones do."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _cached(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """The first `length` positions [length, num_kv_heads, head_dim] of the sequence with this block table."""
    return cache.index_select(0, block_table[: -(-length // cache.shape[1])]).flatten(0, 1)[:length]


def _single_decode(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [num_heads, head_dim] over k and v [length, num_kv_heads, head_dim], no position of them masked."""
    grouped = q.reshape(1, k.shape[1], -1, q.shape[-1])  # query heads that share a KV head as rows of one product
    k, v = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))
    return F.scaled_dot_product_attention(grouped, k, v, scale=scale).reshape(-1, v.shape[-1])


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
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, lengths: Tensor, longest: int, scale: float
) -> Tensor:
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    positions = torch.arange(longest, device=q.device)
    beyond = positions >= lengths.unsqueeze(1)  # [num_seqs, longest]
    positions = positions.masked_fill(beyond, 0)  # the sequence's own first slot holds no NaN
    blocks = block_tables.to(torch.int64).gather(1, positions // block_size)
    slots = (blocks * block_size + positions % block_size).flatten()
    k = k_cache.flatten(0, 1).index_select(0, slots).view(num_seqs, longest, num_kv_heads, k_cache.shape[-1])
    v = v_cache.flatten(0, 1).index_select(0, slots).view(num_seqs, longest, num_kv_heads, v_cache.shape[-1])
    grouped = q.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    mask = torch.zeros(num_seqs, 1, 1, longest, dtype=q.dtype, device=q.device)
    mask.masked_fill_(beyond[:, None, None], float("-inf"))
    out = F.scaled_dot_product_attention(grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    return out.reshape(num_seqs, num_heads, v.shape[-1])


def _length_groups(lengths: list[int]) -> list[list[int]]:
    """Rows by size class: within a group the longest is less than twice the shortest, or all are short."""
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        groups.setdefault(max(length, 256).bit_length(), []).append(row)
    return list(groups.values())
