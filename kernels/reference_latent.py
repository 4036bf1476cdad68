"""Torch twins of the kernels for latent attention (MLA).

A token's latent row [rank + rope] is its normalised K/V latents and, from column `rank` on, the rotated part of its
key, which all heads share. latent_cache [num_blocks, block_size, rank + rope]; a sequence's position p stands in block
block_table[p // block_size], slot p % block_size; other slots may contain anything, NaN included.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def store_latents(
    rows: Tensor, norm_weight: Tensor, eps: float, cos: Tensor, sin: Tensor, latent_cache: Tensor, slots: Tensor
) -> None:
    """Make projected rows [num_tokens, rank + rope] latent rows, in place, and write them into the cache.

    The first `rank` columns are normalised (weight [rank]), the others rotated by cos and sin [num_tokens, rope / 2] in
    the half-split order; slots [num_tokens] int64.
    """
    rank, half = norm_weight.shape[0], cos.shape[1]
    latents = F.rms_norm(rows[:, :rank].float(), (rank,), norm_weight.float(), eps)
    first, second = rows[:, rank : rank + half].float(), rows[:, rank + half :].float()
    rows.copy_(torch.cat((latents, first * cos - second * sin, second * cos + first * sin), dim=1))
    latent_cache.flatten(0, 1).index_copy_(0, slots, rows)


def latent_decode_attention(
    q: Tensor,
    latent_cache: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    rank: int,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one new token per sequence, in latent space: keys are whole rows, values their first `rank` columns.

    q [num_seqs, num_heads, rank + rope], block_tables [num_seqs, max_blocks] and kv_lens [num_seqs] in int32; returns
    [num_seqs, num_heads, rank].
    """
    out = q.new_empty(*q.shape[:2], rank) if out is None else out
    block_size = latent_cache.shape[1]
    for index, kv_len in enumerate(kv_lens.tolist()):
        blocks = block_tables[index, : -(-kv_len // block_size)]
        rows = latent_cache.index_select(0, blocks).flatten(0, 1)[:kv_len]
        scores = q[index].float() @ rows.t().float() * scale  # [num_heads, kv_len]
        out[index] = scores.softmax(dim=-1).to(q.dtype) @ rows[:, :rank]
    return out


def expanded_attention(
    q: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
    cu_q_lens: Tensor,
    cu_kv_lens: Tensor,
    max_q_len: int,
    scale: float,
    is_causal: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of new tokens over expanded keys and values, ragged over sequences; returns output and log-sum-exp.

    q [num_tokens, num_heads, nope + rope]; k [num_keys, num_heads, nope], k_rope [num_keys, rope] (the same for all
    heads), v [num_keys, num_heads, head_dim_v]. Sequence i has the tokens cu_q_lens[i] … cu_q_lens[i + 1] - 1, at most
    `max_q_len`, and the keys cu_kv_lens[i] … cu_kv_lens[i + 1] - 1, both int32 [num_seqs + 1]. With `is_causal` it has
    as many keys as tokens and a token sees those up to itself, else it sees all. Log-sum-exp [num_tokens, num_heads]
    in float32 and to base 2; minus infinity, beside an output of zero, where there are no keys.
    """
    out = q.new_empty(*q.shape[:2], v.shape[-1]) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    q_starts, kv_starts = cu_q_lens.tolist(), cu_kv_lens.tolist()
    for index in range(len(q_starts) - 1):
        tokens, keys = slice(*q_starts[index : index + 2]), slice(*kv_starts[index : index + 2])
        nope = k.shape[-1]
        scores = torch.einsum("qhd,khd->hqk", q[tokens, :, :nope], k[keys])
        scores = (scores + torch.einsum("qhd,kd->hqk", q[tokens, :, nope:], k_rope[keys])).float() * scale
        if is_causal:
            scores.masked_fill_(torch.ones_like(scores[0], dtype=torch.bool).triu_(1), float("-inf"))
        lse[tokens] = scores.logsumexp(dim=-1).t() / math.log(2)
        out[tokens] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1).to(v.dtype), v[keys])
    return out, lse


def absorb_queries(q: Tensor, w_uk: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Take queries into latent space: out[:, h] = (q's plain part times w_uk[h], q's rotary part rotated).

    q [num_tokens, num_heads, nope + rope], w_uk [num_heads, nope, rank]; cos and sin [num_tokens, rope / 2] in float32
    for the half-split order; out [num_tokens, num_heads, rank + rope].
    """
    nope, rank, half = w_uk.shape[1], w_uk.shape[2], cos.shape[1]
    multiply_heads(q[..., :nope], w_uk, out[..., :rank])
    first, second = q[..., nope : nope + half].float(), q[..., nope + half :].float()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    out[..., rank : rank + half] = first * cos - second * sin
    out[..., rank + half :] = second * cos + first * sin


def multiply_heads(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out[:, h] = x[:, h] weight[h] for x [num_tokens, num_heads, ins], weight [num_heads, ins, outs] of any strides.

    out [num_tokens, num_heads, outs].
    """
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))


def merge_attention(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Make (out, lse), attention over some keys, that over `other`'s keys too, in place.

    out and other [num_tokens, num_heads, head_dim_v]; log-sum-exps [num_tokens, num_heads] in float32 and to base 2;
    every token has seen some key in `out`.
    """
    total = torch.logaddexp2(lse, other_lse)
    weight, other_weight = torch.exp2(lse - total).unsqueeze(-1), torch.exp2(other_lse - total).unsqueeze(-1)
    out.copy_(out.float() * weight + other.float() * other_weight)
    lse.copy_(total)
