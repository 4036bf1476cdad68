import pytest
import torch
from torch import Tensor

from limpet.kernels.expert_blocks import bound_blocks, lay_out
from limpet.kernels.expert_routing import Routing
from limpet.kernels.mix_experts import FIXED_TILES
from tests.kernels.compare import assert_close, random
from tests.kernels.implementations import ModuleType, both

# experts, per token, shared, groups, groups per token
LITE, V2 = (64, 6, 2, 1, 1), (160, 6, 2, 8, 3)


def naive_route(
    x: Tensor, router: Tensor, top_k: int, groups: int, groups_per_token: int, factor: float, normalizes: bool
) -> tuple[Tensor, Tensor]:
    """By the definition, token by token in float64: weights and ids, the best first."""
    weights, ids = [], []
    for logits in x.double() @ router.double().t():
        scores = logits.softmax(dim=0)
        size = len(scores) // groups
        best_groups = sorted(range(groups), key=lambda g: (-float(scores[g * size : (g + 1) * size].max()), g))
        allowed = [e for g in best_groups[:groups_per_token] for e in range(g * size, (g + 1) * size)]
        chosen = sorted(allowed, key=lambda e: (-float(scores[e]), e))[:top_k]
        total = float(scores[chosen].sum())
        weights.append(scores[chosen] / total if normalizes and top_k > 1 else scores[chosen] * factor)
        ids.append(chosen)
    return torch.stack(weights), torch.tensor(ids)


@both
@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("shape", [LITE, V2, (20, 4, 1, 4, 2), (6, 1, 0, 3, 1)], ids=str)
def test_experts_are_those_of_a_float32_gate(
    kernels: ModuleType,
    shape: tuple[int, int, int, int, int],
    normalizes: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    num_experts, top_k, num_shared, groups, groups_per_token = shape
    generator = torch.Generator().manual_seed(0)
    x = random(generator, 19, 200, dtype=dtype, device=device)
    router = random(generator, num_experts, 200, dtype=dtype, device=device) / 8
    weights, ids = kernels.route(x, router, top_k, num_shared, groups, groups_per_token, 2.5, normalizes)[:2]
    expected_weights, expected_ids = naive_route(x, router, top_k, groups, groups_per_token, 2.5, normalizes)
    assert torch.equal(ids[:, :top_k].cpu().sort(dim=1).values, expected_ids.int().sort(dim=1).values)
    assert ids[:, top_k:].tolist() == [list(range(num_experts, num_experts + num_shared))] * 19
    assert_close("weights", weights[:, :top_k], expected_weights, torch.float32)
    assert bool((weights[:, top_k:] == 1.0).all())


@both
def test_a_thousand_tokens_go_where_a_float32_gate_sends_them(kernels: ModuleType, device: torch.device) -> None:
    dtype = torch.float16
    generator = torch.Generator().manual_seed(1)
    x = random(generator, 1000, 256, dtype=dtype, device=device)
    router = random(generator, 64, 256, dtype=dtype, device=device) / 16
    ids = kernels.route(x, router, 6, 0, 1, 1, 1.0, False)[1]
    best = (x.double() @ router.double().t()).topk(7)
    assert float((best.values[:, 5] - best.values[:, 6]).min()) > 1e-6, "no token is a tie in float32"
    assert torch.equal(ids.long().sort(dim=1).values, best.indices[:, :6].sort(dim=1).values)


def naive_mixture(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """By the definition in float64, every expert computed for every token."""
    gate, up = torch.einsum("th,eih->tei", x.double(), gate_up.double()).chunk(2, dim=-1)
    parts = torch.einsum("tei,ehi->teh", gate / (1 + torch.exp(-gate)) * up, down.double())
    chosen = parts.gather(1, ids.long().unsqueeze(-1).expand(-1, -1, x.shape[1]))
    return (chosen * weights.double().unsqueeze(-1)).sum(dim=1)


def check_mixture(
    kernels: ModuleType,
    router: Tensor,
    num_tokens: int,
    num_shared: int,
    intermediate: int,
    dtype: torch.dtype,
    device: torch.device,
    fixed_order: bool = False,
) -> None:
    """`router` [num_experts, hidden]; three experts a token."""
    generator = torch.Generator().manual_seed(2)
    num_experts, hidden = router.shape
    x = random(generator, num_tokens, hidden, dtype=dtype, device=device)
    x[:, 0] = 1.0  # a router that looks at it alone sends all tokens to the same experts
    shape = num_experts + num_shared, 2 * intermediate, hidden
    gate_up = (torch.randn(shape, generator=generator) * hidden**-0.5).to(device, dtype)
    down = (torch.randn(shape[0], hidden, intermediate, generator=generator) * intermediate**-0.5).to(device, dtype)
    out = kernels.mix_experts(x, router, gate_up, down, 3, 1, 1, 1.5, False, fixed_order=fixed_order)
    weights, ids = kernels.route(x, router, 3, num_shared, 1, 1, 1.5, False)[:2]
    assert_close("out", out, naive_mixture(x, gate_up, down, weights, ids), dtype)


@both
@pytest.mark.parametrize(("num_tokens", "num_shared", "fixed_order"), [(1, 2, False), (5, 0, True), (40, 1, False)])
def test_mixture_of_experts(
    kernels: ModuleType, num_tokens: int, num_shared: int, fixed_order: bool, dtype: torch.dtype, device: torch.device
) -> None:
    router = random(torch.Generator().manual_seed(3), 9, 64, dtype=dtype, device=device)
    check_mixture(kernels, router, num_tokens, num_shared, 44, dtype, device, fixed_order)


@both
def test_all_tokens_to_the_same_experts(kernels: ModuleType, dtype: torch.dtype, device: torch.device) -> None:
    router = torch.zeros(9, 64, dtype=dtype, device=device)
    router[:, 0] = torch.tensor([0, 1, 9, 2, 8, 0, 7, 0, 0])
    check_mixture(kernels, router, 40, 1, 48, dtype, device)


@both
def test_parts_of_the_experts_add_up_to_the_whole(
    kernels: ModuleType, dtype: torch.dtype, device: torch.device
) -> None:
    """As several ranks have them: one of three parts has a shared expert."""
    generator = torch.Generator().manual_seed(6)
    router = random(generator, 9, 64, dtype=dtype, device=device)
    x = random(generator, 17, 64, dtype=dtype, device=device)
    gate_up = random(generator, 10, 2 * 44, 64, dtype=dtype, device=device) / 8
    down = random(generator, 10, 64, 44, dtype=dtype, device=device) / 7
    weights, ids = kernels.route(x, router, 3, 1, 1, 1, 1.5, False)[:2]
    total = torch.zeros(17, 64, device=device)
    for routed, shared in ((range(4), []), (range(4, 8), []), (range(8, 9), [9])):
        held = [*routed, *shared]
        total += kernels.mix_experts(x, router, gate_up[held], down[held], 3, 1, 1, 1.5, False, routed=routed).float()
    assert_close("sum", total.to(dtype), naive_mixture(x, gate_up, down, weights, ids), dtype)


@pytest.mark.gpu
@both
@pytest.mark.parametrize("num_tokens", [1, 16, 100, 1000, 5000])
def test_experts_of_true_sizes(kernels: ModuleType, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """More than 4,096 rows of choices among them."""
    router = random(torch.Generator().manual_seed(3), 64, 2048, dtype=dtype, device=device) / 45
    check_mixture(kernels, router, num_tokens, 2, 352, dtype, device)


def test_blocks_hold_every_choice_once(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(4)
    ids = torch.stack([torch.randperm(20, generator=generator)[:4] for _ in range(300)]).to(torch.int32)
    ids[ids == 7] = 19  # an expert that nobody goes to
    flat = ids.flatten().tolist()
    ranks = torch.tensor([flat[:place].count(expert) for place, expert in enumerate(flat)], dtype=torch.int32)
    counts = torch.bincount(ids.flatten(), minlength=20).to(torch.int32)
    routing = Routing(torch.ones(300, 4), *(x.to(device) for x in (ids, ranks.view(300, 4), counts)))
    blocks = lay_out(routing, 16)
    assert blocks.counts.shape == (bound_blocks(1200, 20, 16),)
    found = []
    for block, (expert, count) in enumerate(zip(blocks.experts.tolist(), blocks.counts.tolist(), strict=True)):
        rows = blocks.rows[block * 16 : block * 16 + count].tolist()
        assert all(flat[row] == expert for row in rows)
        found += rows
    assert sorted(found) == list(range(1200))


def test_blocks_are_bounded_tightly() -> None:
    assert bound_blocks(8, 66, 16) == 8
    assert bound_blocks(66, 66, 16) == 66
    assert bound_blocks(66 + 15, 66, 16) == 66
    assert bound_blocks(66 + 16, 66, 16) == 67


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [2, 100, 3000])
def test_fixed_order_gives_a_token_the_same_bits_in_any_company(num_tokens: int) -> None:
    from limpet.kernels import launchers

    device, dtype = torch.device("cuda"), torch.bfloat16
    generator = torch.Generator().manual_seed(5)
    x = random(generator, num_tokens, 2048, dtype=dtype, device=device)
    router = random(generator, 64, 2048, dtype=dtype, device=device) / 45
    gate_up = random(generator, 66, 2 * 352, 2048, dtype=dtype, device=device) / 45
    down = random(generator, 66, 2048, 352, dtype=dtype, device=device) / 19
    assert FIXED_TILES.block_rows == 32
    whole = launchers.mix_experts(x, router, gate_up, down, 6, 1, 1, 1.0, False, fixed_order=True)
    for start in range(0, num_tokens, max(1, num_tokens // 3)):
        alone = launchers.mix_experts(
            x[start : start + 1], router, gate_up, down, 6, 1, 1, 1.0, False, fixed_order=True
        )
        assert torch.equal(whole[start], alone[0])
