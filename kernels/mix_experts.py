"""A mixture of experts: routing, both halves of the experts' MLPs, and the sum over each token's choices."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.expert_blocks import lay_out, one_token_blocks
from limpet.kernels.expert_routing import route
from limpet.kernels.grouped_matmul import Tile, gate_and_up, weighted_down
from limpet.kernels.tuned_tables import tuned

BLOCK_COLUMNS = 512
MAX_TUNED_TOKENS = 4096  # more are computed like so many


class Tiles(NamedTuple):
    """Meta-parameters of both halves, which share their blocks of rows."""

    block_rows: int
    gate_up: Tile
    down: Tile


@triton.jit
def _sum_choices_kernel(
    x_ptr,
    ids_ptr,
    out_ptr,
    size,
    out_stride,
    NUM_CHOICES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    ALL_HERE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(NUM_CHOICES):
        row = token * NUM_CHOICES + choice
        here = mask
        if not ALL_HERE:
            here = mask & (tl.load(ids_ptr + row) < NUM_EXPERTS)
        x = tl.load(x_ptr + row * size + columns, mask=here, other=0.0)
        total += x.to(tl.float32)
    tl.store(out_ptr + token * out_stride + columns, total.to(out_ptr.dtype.element_ty), mask=mask)


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
    the experts whose weights these are, None all of them: what a token gets of others is left out of its sum. With
    `fixed_order` a token's bits do not depend on the other tokens, nor on how many there are.
    """
    num_experts = router.shape[0]
    routed = range(num_experts) if routed is None else routed
    num_shared = gate_up.shape[0] - len(routed)
    routing = route(x, router, top_k, num_shared, num_groups, groups_per_token, scaling_factor, normalizes, routed)
    num_choices = top_k + num_shared
    all_here = len(routed) == num_experts
    num_all_shared = num_shared if all_here else num_shared * num_experts // len(routed)
    tiles = FIXED_TILES if fixed_order else pick_tiles(x.shape[0], top_k, num_experts, num_all_shared, gate_up)
    arrange = one_token_blocks if x.shape[0] == 1 and all_here else lay_out
    blocks = arrange(routing, tiles.block_rows)
    hidden = gate_and_up(x, gate_up, blocks, num_choices, tiles.gate_up)
    parts = weighted_down(hidden, down, routing.weights, blocks, tiles.down)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _sum_choices_kernel[(x.shape[0], triton.cdiv(x.shape[1], BLOCK_COLUMNS))](
        parts,
        routing.ids,
        out,
        x.shape[1],
        out.stride(0),
        NUM_CHOICES=num_choices,
        NUM_EXPERTS=gate_up.shape[0],
        ALL_HERE=all_here,
        BLOCK=BLOCK_COLUMNS,
        num_warps=4,
    )
    return out


FIXED_TILES = Tiles(32, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3))


def pick_tiles(num_tokens: int, top_k: int, num_routed: int, num_shared: int, gate_up: Tensor) -> Tiles:
    """By how many tokens there are, and what was measured for them or for the next larger power of two.

    `num_routed` and `num_shared` count all experts, those that are elsewhere too: an expert gets as many rows wherever
    the others are.
    """
    (_, num_rows, hidden), element_size = gate_up.shape, gate_up.element_size()
    num_choices, num_experts = top_k + num_shared, num_routed + num_shared
    key = tile_key(num_tokens, num_choices, num_experts, num_rows // 2, hidden, element_size)
    if measured := tuned("mix_experts", key, gate_up.device):
        return tiles_of(measured)
    if element_size > 2:  # float32, without tensor cores
        return Tiles(16, Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))
    rows_per_expert = num_tokens * num_choices / num_experts
    if rows_per_expert <= 16:
        return Tiles(16, Tile(32, 128, 4, 4), Tile(64, 128, 4, 4))
    if rows_per_expert <= 64:
        return Tiles(32, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4))
    if rows_per_expert <= 192:
        return Tiles(64, Tile(64, 64, 4, 3), Tile(128, 64, 4, 3))
    return Tiles(128, Tile(128, 64, 8, 3), Tile(256, 64, 8, 3))


def tiles_of(numbers: tuple[int, ...]) -> Tiles:
    """A table's entry: rows, then a Tile of each half."""
    return Tiles(numbers[0], Tile(*numbers[1:5]), Tile(*numbers[5:9]))


def tile_key(
    num_tokens: int, num_choices: int, num_experts: int, intermediate: int, hidden: int, element_size: int
) -> str:
    tokens = min(triton.next_power_of_2(num_tokens), MAX_TUNED_TOKENS)
    shape = f"{num_choices} of {num_experts}, {intermediate} x {hidden}"
    return f"{shape}, {element_size} bytes, {tokens} tokens"
