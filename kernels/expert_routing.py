"""Which experts each token goes to: scores of a softmax over all experts, the best of them chosen.

Products of inputs and router are summed in float32 and never rounded to anything less, so that the choice is that of a
float32 gate. Their inputs are cut into a fixed number of pieces, each a program's: a token alone would else leave the
device idle. The second kernel adds the pieces up, chooses, and counts: a choice's rank is how many choices of the same
expert it found before it. Ranks depend on who came first; nothing that is computed from them does.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.checks import require

NUM_PIECES = 8
BLOCK_TOKENS = 16  # of a program that multiplies: the tensor cores' smallest tile
CHOOSING_TOKENS = 4  # of a program that chooses: one a warp
MAX_BLOCK_INS = 128


class Routing(NamedTuple):
    """Choices of each token, the chosen experts first, then the shared ones."""

    weights: Tensor  # [num_tokens, num_choices] float32
    ids: Tensor  # [num_tokens, num_choices] int32
    ranks: Tensor  # [num_tokens, num_choices] int32, among the choices of the same expert
    counts: Tensor  # [num_experts + num_shared] int32, choices of each expert that is here


@triton.jit(do_not_specialize=["num_tokens"])
def _scores_kernel(
    x_ptr,
    router_ptr,
    scores_ptr,  # [NUM_PIECES, num_tokens, num_experts] float32
    counts_ptr,
    num_tokens,
    num_ins,
    piece_len,
    x_stride,
    router_stride,
    NUM_EXPERTS: tl.constexpr,
    NUM_COUNTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_COUNTS: tl.constexpr,
    BLOCK_INS: tl.constexpr,
):
    piece = tl.program_id(1)
    if tl.program_id(0) + piece == 0:
        each = tl.arange(0, BLOCK_COUNTS)
        tl.store(counts_ptr + each, 0, mask=each < NUM_COUNTS)
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    experts = tl.arange(0, BLOCK_EXPERTS)
    valid_tokens, valid_experts = tokens < num_tokens, experts < NUM_EXPERTS
    x_rows = x_ptr + tokens.to(tl.int64)[:, None] * x_stride
    router_rows = router_ptr + experts[:, None] * router_stride
    start = piece * piece_len
    end = min(start + piece_len, num_ins)
    acc = tl.zeros([BLOCK_TOKENS, BLOCK_EXPERTS], dtype=tl.float32)
    for first in range(start, end, BLOCK_INS):
        ins = (first + tl.arange(0, BLOCK_INS))[None, :]
        x = tl.load(x_rows + ins, mask=valid_tokens[:, None] & (ins < end), other=0.0)
        router = tl.load(router_rows + ins, mask=valid_experts[:, None] & (ins < end), other=0.0)
        acc = tl.dot(x, tl.trans(router), acc, input_precision="ieee")
    rows = (piece * num_tokens + tokens).to(tl.int64) * NUM_EXPERTS
    mask = valid_tokens[:, None] & valid_experts[None, :]
    tl.store(scores_ptr + rows[:, None] + experts[None, :], acc, mask=mask)


@triton.jit
def _in_best_groups(
    scores,  # [BLOCK_TOKENS, BLOCK_EXPERTS], -1 past the last expert
    groups,  # [1, BLOCK_EXPERTS]
    NUM_GROUPS: tl.constexpr,
    GROUPS_PER_TOKEN: tl.constexpr,
):
    """Whether each expert's group has one of the highest best scores; of equal ones the first wins."""
    own_best = tl.zeros_like(scores)
    for group in range(0, NUM_GROUPS):
        best = tl.max(tl.where(groups == group, scores, -1.0), axis=1)[:, None]
        own_best = tl.where(groups == group, best, own_best)
    num_better = tl.zeros_like(scores)
    for group in range(0, NUM_GROUPS):
        best = tl.max(tl.where(groups == group, scores, -1.0), axis=1)[:, None]
        is_better = (best > own_best) | ((best == own_best) & (groups > group))
        num_better += tl.where(is_better, 1.0, 0.0)
    return num_better < GROUPS_PER_TOKEN


@triton.jit(do_not_specialize=["num_tokens"])
def _choose_kernel(
    scores_ptr,  # [NUM_PIECES, num_tokens, num_experts] float32
    weights_ptr,
    ids_ptr,
    ranks_ptr,
    counts_ptr,
    num_tokens,
    scaling_factor,
    NUM_EXPERTS: tl.constexpr,
    NUM_PIECES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_PER_TOKEN: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    FIRST: tl.constexpr,
    NUM_HERE: tl.constexpr,
    NORMALIZES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    experts = tl.arange(0, BLOCK_EXPERTS)[None, :]
    valid_tokens = tokens < num_tokens
    mask = valid_tokens[:, None] & (experts < NUM_EXPERTS)
    logits = tl.zeros([BLOCK_TOKENS, BLOCK_EXPERTS], dtype=tl.float32)
    for piece in range(0, NUM_PIECES):
        rows = (piece * num_tokens + tokens).to(tl.int64) * NUM_EXPERTS
        logits += tl.load(scores_ptr + rows[:, None] + experts, mask=mask, other=0.0)
    logits = tl.where(experts < NUM_EXPERTS, logits, float("-inf"))
    powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    scores = powers / tl.sum(powers, axis=1)[:, None]
    scores = tl.where(scores >= 0.0, scores, 0.0)  # NaN, as tokens that pad a step may have, must choose experts too
    scores = tl.where(experts < NUM_EXPERTS, scores, -1.0)
    if GROUPS_PER_TOKEN < NUM_GROUPS:
        groups = experts // (NUM_EXPERTS // NUM_GROUPS)
        scores = tl.where(_in_best_groups(scores, groups, NUM_GROUPS, GROUPS_PER_TOKEN), scores, -1.0)

    choices = tl.arange(0, BLOCK_CHOICES)[None, :]
    weights = tl.zeros([BLOCK_TOKENS, BLOCK_CHOICES], dtype=tl.float32)
    ids = NUM_EXPERTS - TOP_K + choices + tl.zeros([BLOCK_TOKENS, BLOCK_CHOICES], dtype=tl.int32)
    for choice in range(0, TOP_K):
        best = tl.max(scores, axis=1)[:, None]
        best_id = tl.argmax(scores, axis=1)[:, None]
        weights = tl.where(choices == choice, best, weights)
        ids = tl.where(choices == choice, best_id, ids)
        scores = tl.where(experts == best_id, -2.0, scores)
    weights = weights / (tl.sum(weights, axis=1) + 1e-20)[:, None] if NORMALIZES else weights * scaling_factor
    weights = tl.where(choices < TOP_K, weights, 1.0)

    chosen = valid_tokens[:, None] & (choices < TOP_K)
    if NUM_HERE < NUM_EXPERTS:
        is_here = (ids >= FIRST) & (ids < FIRST + NUM_HERE)
        ids = tl.where(is_here, ids - FIRST, NUM_HERE + NUM_SHARED)
        ids = tl.where(choices < TOP_K, ids, NUM_HERE - TOP_K + choices)
        chosen = chosen & is_here
    ranks = tl.atomic_add(counts_ptr + ids, 1, mask=chosen, sem="relaxed")
    ranks = tl.where(choices < TOP_K, ranks, tokens[:, None])  # every token goes to a shared expert
    if NUM_SHARED > 0:
        last = chosen | (choices < TOP_K + NUM_SHARED)
        tl.store(counts_ptr + ids, num_tokens, mask=last & (choices >= TOP_K) & (tokens == 0)[:, None])
    places = tokens.to(tl.int64)[:, None] * (TOP_K + NUM_SHARED) + choices
    stored = valid_tokens[:, None] & (choices < TOP_K + NUM_SHARED)
    tl.store(weights_ptr + places, weights, mask=stored)
    tl.store(ids_ptr + places, ids, mask=stored)
    tl.store(ranks_ptr + places, ranks, mask=stored)


def route(
    x: Tensor,
    router: Tensor,
    top_k: int,
    num_shared: int,
    num_groups: int,
    groups_per_token: int,
    scaling_factor: float,
    normalizes: bool,
    routed: range | None = None,
) -> Routing:
    """Which experts each token goes to.

    x [num_tokens, hidden], router [num_experts, hidden]; products and softmax in float32. The experts are in
    `num_groups` equal groups; of a token's scores only the `groups_per_token` groups with the highest score count.
    Weights are the scores of the `top_k` best experts, times `scaling_factor`, or with `normalizes` (and more than one
    expert) divided by their sum instead. Shared experts num_experts, num_experts + 1, … follow with weight 1.
    DeepSeek-AI 2024 (DeepSeek-V2), section 2.2, as released. With `routed`, the experts that are here, ids are counted
    from the first of them, the shared experts' follow, and experts that are elsewhere have the id after those.
    """
    (num_tokens, num_ins), num_experts = x.shape, router.shape[0]
    routed = range(num_experts) if routed is None else routed
    num_counts = len(routed) + num_shared
    require(router.shape[1] == num_ins, "router is [num_experts, hidden] for x [num_tokens, hidden]")
    require(x.stride(1) == router.stride(1) == 1, "rows are contiguous")
    require(num_experts % num_groups == 0, "groups of experts are equal")
    num_choices = top_k + num_shared
    block_ins = min(MAX_BLOCK_INS, max(16, triton.next_power_of_2(triton.cdiv(num_ins, NUM_PIECES))))
    piece_len = triton.cdiv(triton.cdiv(num_ins, NUM_PIECES), block_ins) * block_ins
    block_experts = max(16, triton.next_power_of_2(num_experts))
    scores = torch.empty(NUM_PIECES, num_tokens, num_experts, dtype=torch.float32, device=x.device)
    counts = torch.empty(num_counts, dtype=torch.int32, device=x.device)
    _scores_kernel[(triton.cdiv(num_tokens, BLOCK_TOKENS), NUM_PIECES)](
        x,
        router,
        scores,
        counts,
        num_tokens,
        num_ins,
        piece_len,
        x.stride(0),
        router.stride(0),
        NUM_EXPERTS=num_experts,
        NUM_COUNTS=num_counts,
        BLOCK_TOKENS=BLOCK_TOKENS,
        BLOCK_EXPERTS=block_experts,
        BLOCK_COUNTS=triton.next_power_of_2(num_counts),
        BLOCK_INS=block_ins,
        num_warps=4,
    )
    weights = torch.empty(num_tokens, num_choices, dtype=torch.float32, device=x.device)
    ids, ranks = (torch.empty(num_tokens, num_choices, dtype=torch.int32, device=x.device) for _ in range(2))
    _choose_kernel[(triton.cdiv(num_tokens, CHOOSING_TOKENS),)](
        scores,
        weights,
        ids,
        ranks,
        counts,
        num_tokens,
        scaling_factor,
        NUM_EXPERTS=num_experts,
        NUM_PIECES=NUM_PIECES,
        NUM_GROUPS=num_groups,
        GROUPS_PER_TOKEN=groups_per_token,
        TOP_K=top_k,
        NUM_SHARED=num_shared,
        FIRST=routed.start,
        NUM_HERE=len(routed),
        NORMALIZES=normalizes and top_k > 1,
        BLOCK_TOKENS=CHOOSING_TOKENS,
        BLOCK_EXPERTS=block_experts,
        BLOCK_CHOICES=triton.next_power_of_2(num_choices),
        num_warps=CHOOSING_TOKENS,
    )
    return Routing(weights, ids, ranks, counts)
