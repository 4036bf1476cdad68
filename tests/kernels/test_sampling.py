import pytest
import torch
from torch import Tensor

from limpet.kernels import reference, sampling
from tests.kernels.implementations import ModuleType, both

NUM_SLOTS = 16
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
WARM = GREEDY | {"temperature": 0.8}


class Slots:
    """Sampling settings of some slots, as the kernels take them; slot i is seeded with 1000 + i unless given."""

    def __init__(self, settings: list[dict[str, float]], device: torch.device) -> None:
        each = [GREEDY | {"seed": 1000 + slot} | given for slot, given in enumerate(settings)]
        self.device = device
        self.temperature = torch.tensor([one["temperature"] for one in each], device=device)
        self.top_k = torch.tensor([int(one["top_k"]) for one in each], device=device)
        self.top_p = torch.tensor([one["top_p"] for one in each], device=device)
        self.min_p = torch.tensor([one["min_p"] for one in each], device=device)
        self.seed = torch.tensor([int(one["seed"]) for one in each], device=device)

    def sample(self, kernels: ModuleType, logits: Tensor, rows: list[int], positions: list[int]) -> list[int]:
        ids: Tensor = kernels.sample(
            logits,
            torch.tensor(rows, device=self.device),
            torch.tensor(positions, device=self.device),
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seed,
            draws=bool((self.temperature > 0).any()),
            filters=bool(((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)).any()),
        )
        values: list[int] = ids.tolist()
        return values


def allowed_ids(logits: Tensor, settings: dict[str, float]) -> list[bool]:
    """By the definition: ids from the most likely one on, ties by id, cut by top-k, then top-p, then min-p."""
    order = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    kept = order[: int(settings["top_k"]) or None]
    scaled = logits.double() / settings["temperature"]
    weights = torch.exp(scaled - scaled.max())
    probabilities = (weights / weights[kept].sum()).tolist()
    mass, allowed = 0.0, [False] * len(logits)
    for rank, token in enumerate(kept):
        if rank and (mass >= settings["top_p"] or probabilities[token] < settings["min_p"] * probabilities[kept[0]]):
            break
        allowed[token] = True
        mass += probabilities[token]
    return allowed


@both
@pytest.mark.parametrize("vocab_size", [5, 300, 10_000])
def test_greedy_takes_the_first_of_the_largest(kernels: ModuleType, vocab_size: int, device: torch.device) -> None:
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(0)).to(device)
    logits[1] = 0.0
    logits[2, [3, vocab_size - 1]] = 100.0
    slots = Slots([GREEDY] * 3, device)
    assert slots.sample(kernels, logits, [0, 1, 2], [5, 6, 7]) == [int(logits[0].argmax()), 0, 3]


@both
@pytest.mark.parametrize(
    "settings", [GREEDY, WARM, WARM | {"top_k": 3, "top_p": 0.9}], ids=["greedy", "draw", "filter"]
)
def test_a_row_that_is_not_finite_gets_no_id(
    kernels: ModuleType, settings: dict[str, float], device: torch.device
) -> None:
    logits = torch.zeros(5, 5000, device=device)
    logits[0, 4321] = float("nan")
    logits[1, 17] = float("inf")
    logits[2] = float("-inf")
    logits[3, 4000:] = float("-inf")
    ids = Slots([settings] * 5, device).sample(kernels, logits, [0, 1, 2, 3, 4], [1] * 5)
    assert ids[:3] == [-1, -1, -1]
    assert 0 <= ids[3] < 4000
    assert 0 <= ids[4] < 5000


@both
def test_slots_keep_their_own_settings_in_any_order(kernels: ModuleType, device: torch.device) -> None:
    logits = 3 * torch.randn(4, 1000, generator=torch.Generator().manual_seed(1)).to(device)
    slots = Slots([GREEDY, WARM, WARM | {"top_k": 5}, WARM | {"temperature": 2.0, "top_p": 0.5}], device)
    together = slots.sample(kernels, logits, [0, 1, 2, 3], [9, 8, 7, 6])
    assert together[0] == int(logits[0].argmax())
    backwards = slots.sample(kernels, logits.flip(0), [3, 2, 1, 0], [6, 7, 8, 9])
    assert backwards == together[::-1]
    for row in range(4):
        assert slots.sample(kernels, logits[row : row + 1], [row], [9 - row]) == together[row : row + 1]


FILTERS = {
    "top-k": {"top_k": 7},
    "top-k above the vocabulary": {"top_k": 10**9},
    "top-p": {"top_p": 0.6},
    "top-p 0": {"top_p": 0.0},
    "min-p": {"min_p": 0.1},
    "all": {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
    "top-k cuts before top-p": {"top_k": 4, "top_p": 0.95},
}


def shaped_logits(rounded: bool) -> Tensor:
    logits = 1.5 * torch.randn(50, generator=torch.Generator().manual_seed(2))
    return logits.round() if rounded else logits  # rounded: many ties, zeros of both signs among them


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("name", FILTERS)
def test_the_bounds_keep_exactly_the_allowed_ids(name: str, rounded: bool, device: torch.device) -> None:
    settings, logits = WARM | FILTERS[name], shaped_logits(rounded)
    slots = Slots([settings], device)
    thresholds, last_ties = sampling.find_bounds(
        logits.to(device)[None],
        torch.tensor([0], device=device),
        slots.temperature,
        slots.top_k,
        slots.top_p,
        slots.min_p,
    )
    threshold, last_tie = float(thresholds[0]), int(last_ties[0])
    kept = (logits > threshold) | ((logits == threshold) & (torch.arange(50) <= last_tie))
    assert kept.tolist() == allowed_ids(logits, settings)


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("name", FILTERS)
def test_draws_of_the_twin_reach_the_likely_allowed_ids_and_no_other(name: str, rounded: bool) -> None:
    settings, logits, num_draws = WARM | FILTERS[name], shaped_logits(rounded), 600
    allowed = allowed_ids(logits, settings)
    rows = list(range(num_draws))
    slots = Slots([settings] * num_draws, torch.device("cpu"))
    reached = set(slots.sample(reference, logits.expand(num_draws, -1), rows, [3] * num_draws))
    assert all(allowed[token] for token in reached)
    assert reached.issuperset(t for t in range(50) if allowed[t] and float(logits[t]) > float(logits.max()) - 2)


def test_both_draw_the_same_ids(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    kinds = [WARM, WARM | {"top_k": 20}, WARM | {"top_p": 0.9}, WARM | {"min_p": 0.05, "temperature": 1.7}]
    seeds = [0, -1, 2**62, -(2**63), *range(12)]
    slots = Slots([kinds[slot % 4] | {"seed": seed} for slot, seed in enumerate(seeds)], device)
    logits = 2 * torch.randn(NUM_SLOTS, 1000, generator=generator).to(device)
    for start in (0, 10**6):
        positions = [start + row for row in range(NUM_SLOTS)]
        ids = slots.sample(sampling, logits, list(range(NUM_SLOTS)), positions)
        assert ids == slots.sample(reference, logits, list(range(NUM_SLOTS)), positions)


def test_draws_of_the_twin_follow_the_softmax() -> None:
    num_draws, logits = 5000, torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5])
    slots = Slots([WARM] * num_draws, torch.device("cpu"))
    ids = torch.tensor(slots.sample(reference, logits.expand(num_draws, -1), list(range(num_draws)), [7] * num_draws))
    expected = (logits / WARM["temperature"]).softmax(dim=0) * num_draws
    chi_square = float(((torch.bincount(ids, minlength=5) - expected) ** 2 / expected).sum())
    assert chi_square < 23.5  # 4 degrees of freedom: exceeded once in 10,000
