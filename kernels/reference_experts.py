"""Torch twins of the kernels for mixtures of experts."""

import torch
import torch.nn.functional as F
from torch import Tensor


def route(
    x: Tensor,
    router: Tensor,
    top_k: int,
    num_shared: int,
    num_groups: int,
    groups_per_token: int,
    scaling_factor: float,
    normalizes: bool,
) -> tuple[Tensor, Tensor]:
    """Which experts each token goes to: weights and ids [num_tokens, top_k + num_shared], float32 and int32.

    x [num_tokens, hidden], router [num_experts, hidden]; products and softmax in float32. The experts are in
    `num_groups` equal groups; of a token's scores only the `groups_per_token` groups with the highest score count.
    Weights are the scores of the `top_k` best experts, times `scaling_factor`, or with `normalizes` (and more than one
    expert) divided by their sum instead. Shared experts num_experts, num_experts + 1, … follow with weight 1.
    DeepSeek-AI 2024 (DeepSeek-V2), section 2.2, as released.
    """
    num_tokens, num_experts = x.shape[0], router.shape[0]
    scores = F.linear(x.float(), router.float()).softmax(dim=-1)
    if groups_per_token < num_groups:
        best = scores.view(num_tokens, num_groups, -1).amax(dim=-1).topk(groups_per_token).indices
        kept = torch.zeros(num_tokens, num_groups, dtype=torch.bool, device=x.device).scatter_(1, best, True)
        scores = scores.masked_fill(~kept.repeat_interleave(num_experts // num_groups, dim=1), 0.0)
    weights, ids = scores.topk(top_k)
    if normalizes and top_k > 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    else:
        weights = weights * scaling_factor
    shared = torch.arange(num_experts, num_experts + num_shared, device=x.device).expand(num_tokens, -1)
    ids = torch.cat((ids, shared), dim=1).to(torch.int32)
    return torch.cat((weights, torch.ones_like(shared, dtype=torch.float32)), dim=1), ids


def place_choices(ids: Tensor, routed: range, num_experts: int, num_shared: int) -> Tensor:
    """Where a choice's weights stand: the `routed` experts first, then the shared ones; past them what is elsewhere."""
    is_shared, is_here = ids >= num_experts, (ids >= routed.start) & (ids < routed.stop)
    elsewhere = torch.where(is_shared, ids - num_experts + len(routed), len(routed) + num_shared)
    return torch.where(is_here, ids - routed.start, elsewhere)


def mix_experts(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    num_groups: int,
    groups_per_token: int,
    scaling_factor: float,
    normalizes: bool,
    routed: range | None = None,
    fixed_order: bool = False,
) -> Tensor:
    """The weighted sum of the gated MLPs that each token is routed to, and of the shared ones, like x.

    x [num_tokens, hidden], router [num_experts, hidden]; gate_up [num_routed + num_shared, 2 * intermediate, hidden] =
    gate rows, then up rows; down [num_routed + num_shared, hidden, intermediate]; the rest as for `route`. `routed` are
    the experts whose weights these are, None all of them: what a token gets of others is left out of its sum. The order
    of additions is the library's here, whatever `fixed_order` says.
    """
    routed = range(router.shape[0]) if routed is None else routed
    num_shared = gate_up.shape[0] - len(routed)
    weights, ids = route(x, router, top_k, num_shared, num_groups, groups_per_token, scaling_factor, normalizes)
    ids = place_choices(ids, routed, router.shape[0], num_shared)
    order = ids.flatten().argsort(stable=True)
    y = x.new_zeros(ids.numel(), x.shape[1])
    rows_of = torch.split(order, torch.bincount(ids.flatten(), minlength=gate_up.shape[0] + 1).tolist())
    for expert, rows in enumerate(rows_of[:-1]):
        if rows.numel():
            gate, up = F.linear(x[rows // ids.shape[1]], gate_up[expert]).chunk(2, dim=-1)
            y[rows] = F.linear(F.silu(gate) * up, down[expert])
    weighted = y.view(*ids.shape, -1).float() * weights.unsqueeze(-1)
    return weighted.sum(dim=1).to(x.dtype)
