"""Sampled ids: drawn from the distribution that the settings describe, and a request's own whatever stands beside it.

Expected distributions are computed here from transformers' logits, in float64 and one id at a time.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from limpet.backend.config import EngineConfig
from limpet.backend.offline import LocalEngine
from limpet.backend.sampling_params import SamplingParams
from tests.aids.tiny_models import ConvertedTiny, convert_tiny

Floats = npt.NDArray[np.float64]
PROMPT = [5, 17, 123, 44]
NUM_DRAWS = 4000
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
WARM = SamplingParams(temperature=1.3, max_tokens=24, ignore_eos=True, seed=7)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ConvertedTiny:
    return convert_tiny(tmp_path_factory.mktemp("sampling"), "grouped-query")


@pytest.fixture(scope="module")
def engine(tiny: ConvertedTiny) -> Iterator[LocalEngine]:
    with LocalEngine(tiny.model_dir, EngineConfig(max_batch_size=64, max_waiting=NUM_DRAWS)) as engine:
        yield engine


def logits_after(tiny: ConvertedTiny, ids: list[int]) -> Floats:
    """Transformers' logits after every id. # [len(ids), vocab]"""
    with torch.inference_mode():
        return np.asarray(tiny.reference(torch.tensor([ids])).logits[0].double())


def softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def expected_probabilities(logits: Floats, params: SamplingParams) -> Floats:
    """Temperature, then top-k, then top-p, then min-p, each over what the one before left."""
    ranked = sorted(enumerate(softmax(logits / params.temperature)), key=lambda pair: -pair[1])
    if params.top_k:
        ranked = ranked[: params.top_k]
    kept, mass, total = [], 0.0, sum(probability for _, probability in ranked)
    for token, probability in ranked:
        if mass / total < params.top_p:
            kept.append((token, probability))
        mass += probability
    kept = [(token, probability) for token, probability in kept if probability >= params.min_p * ranked[0][1]]
    probabilities = np.zeros(len(logits))
    for token, probability in kept:
        probabilities[token] = probability
    return np.asarray(probabilities / probabilities.sum())


def assert_drawn_from(draws: list[int], probabilities: Floats) -> None:
    """Pearson's chi-square over ids expected at least five times, the others as one; bound: six sigma."""
    counts = Counter(draws)
    assert all(probabilities[token] > 0 for token in counts), "an id was drawn that the settings exclude"
    expected = probabilities * len(draws)
    common = [token for token in range(len(expected)) if expected[token] >= 5]
    bins = [(counts[token], expected[token]) for token in common]
    rest = len(draws) - sum(expected_count for _, expected_count in bins)
    if rest >= 1:
        bins.append((len(draws) - sum(count for count, _ in bins), rest))
    statistic = sum((count - expected_count) ** 2 / expected_count for count, expected_count in bins)
    degrees = len(bins) - 1
    assert degrees >= 2
    assert statistic < degrees + 6 * np.sqrt(2 * degrees), f"chi-square {statistic:.1f} at {degrees} degrees of freedom"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=2.5),
        SamplingParams(temperature=1.5, top_k=7),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(temperature=2.0, min_p=0.1),
        SamplingParams(temperature=2.0, top_k=20, top_p=0.9, min_p=0.05),
        SamplingParams(temperature=1.5, top_k=10**7),
    ],
    ids=lambda params: ", ".join(f"{key}={value}" for key, value in msgspec.to_builtins(params).items()) or "plain",
)
def test_draws_follow_the_distribution_of_the_settings(
    engine: LocalEngine, tiny: ConvertedTiny, params: SamplingParams
) -> None:
    seeded = [msgspec.structs.replace(params, seed=seed, max_tokens=1, ignore_eos=True) for seed in range(NUM_DRAWS)]
    draws = [completion.ids[0] for completion in engine.generate([PROMPT] * NUM_DRAWS, seeded)]
    assert_drawn_from(draws, expected_probabilities(logits_after(tiny, PROMPT)[-1], params))


def test_draws_along_one_answer_are_independent(engine: LocalEngine, tiny: ConvertedTiny) -> None:
    """One seed, many positions: the probability integral transform of its draws is uniform.

    With u between the cumulative probabilities below and up to the drawn id, u is uniform if the draws are right.
    """
    num_tokens, spread = 400, np.random.default_rng(0)
    transformed = []
    for seed in range(4):
        params = SamplingParams(temperature=1.5, max_tokens=num_tokens, ignore_eos=True, seed=seed)
        ids = engine.generate([PROMPT], params)[0].ids
        logits = logits_after(tiny, PROMPT + ids)[len(PROMPT) - 1 : -1]
        for drawn, row in zip(ids, logits, strict=True):
            probabilities = softmax(row / 1.5)
            transformed.append(probabilities[:drawn].sum() + spread.random() * probabilities[drawn])
    tenths = [min(9, int(10 * u)) for u in transformed]
    assert_drawn_from(tenths, np.full(10, 0.1))
    following = [10 * one + other for one, other in pairwise(tenths)]
    assert_drawn_from(following, np.full(100, 0.01))


def test_a_seed_gives_the_same_ids_alone_in_company_and_on_any_row(engine: LocalEngine) -> None:
    prompts = [[3 + place, 99, 45 + 2 * place] for place in range(8)]
    each = [msgspec.structs.replace(WARM, seed=place, max_tokens=12 + place) for place in range(8)]
    alone = [engine.generate([prompt], [params])[0].ids for prompt, params in zip(prompts, each, strict=True)]
    assert [completion.ids for completion in engine.generate(prompts, each)] == alone
    assert [completion.ids for completion in engine.generate(prompts[::-1], each[::-1])] == alone[::-1]


def test_another_seed_gives_other_ids(engine: LocalEngine) -> None:
    answers = engine.generate([PROMPT] * 8, [msgspec.structs.replace(WARM, seed=seed) for seed in range(8)])
    assert len({tuple(completion.ids) for completion in answers}) == 8


def test_the_largest_seed_is_taken(engine: LocalEngine) -> None:
    last, first = (msgspec.structs.replace(WARM, seed=seed) for seed in (2**64 - 1, 0))
    one, other = engine.generate([PROMPT, PROMPT], [last, first])
    assert one.ids != other.ids


@pytest.mark.parametrize("seed", [0, 1])
def test_temperature_zero_and_top_k_one_are_argmax(engine: LocalEngine, tiny: ConvertedTiny, seed: int) -> None:
    settings = [
        msgspec.structs.replace(GREEDY, seed=seed),
        msgspec.structs.replace(WARM, seed=seed, top_k=1),
        msgspec.structs.replace(GREEDY, seed=seed, top_k=50, top_p=0.5),
    ]
    for completion in engine.generate([PROMPT] * len(settings), settings):
        logits = logits_after(tiny, PROMPT + completion.ids)[len(PROMPT) - 1 : -1]
        assert completion.ids == logits.argmax(axis=1).tolist()


def test_top_k_beyond_the_vocabulary_is_off(engine: LocalEngine) -> None:
    beyond = [msgspec.structs.replace(WARM, top_k=top_k) for top_k in (0, 300, 301, 10**7, 2**31 - 1)]
    answers = engine.generate([PROMPT] * len(beyond), beyond)
    assert [completion.ids for completion in answers] == [answers[0].ids] * len(beyond)


def test_greedy_rows_are_untouched_by_sampled_neighbours(engine: LocalEngine) -> None:
    prompts = [[place + 20, 7, 250] for place in range(6)]
    settings = [GREEDY if place % 2 == 0 else msgspec.structs.replace(WARM, top_k=64) for place in range(6)]
    mixed = engine.generate(prompts, settings)
    greedy = engine.generate(prompts, GREEDY)
    for place in (0, 2, 4):
        assert mixed[place].ids == greedy[place].ids


def test_every_request_of_a_batch_has_its_own_settings(engine: LocalEngine) -> None:
    lengths = [1, 2, 3, 5, 8, 13, 21, 34]
    settings = [
        SamplingParams(temperature=0.5 * place, top_k=place, max_tokens=length, ignore_eos=True, seed=place)
        for place, length in enumerate(lengths)
    ]
    answers = engine.generate([PROMPT] * len(lengths), settings)
    assert [len(completion.ids) for completion in answers] == lengths
    assert {completion.finish_reason for completion in answers} == {"length"}


def test_stop_token_ids_end_an_answer_also_under_ignore_eos(engine: LocalEngine) -> None:
    ids = engine.generate([PROMPT], GREEDY)[0].ids
    place = next(place for place in range(3, len(ids)) if ids[place] not in ids[:place])
    [stopped] = engine.generate([PROMPT], msgspec.structs.replace(GREEDY, stop_token_ids=(ids[place],)))
    assert stopped.ids == ids[: place + 1]
    assert stopped.finish_reason == "stop"
