"""Deterministic mode: a request's ids do not depend on its company, its chunks, cache hits or preemption."""

import random
from pathlib import Path

import pytest

from limpet.backend.config import ConfigError, EngineConfig
from limpet.backend.offline import LocalEngine
from limpet.backend.sampling_params import SamplingParams
from tests.aids.families import BASE, FAMILIES, convert_family
from tests.aids.tiny_models import convert_tiny

NUM_REQUESTS = 64
NUM_BLOCKS = 96
ROUNDS = [  # settings of the engine, other requests beside the watched ones
    ({"max_batch_size": 64}, 0),
    ({"max_batch_size": 64}, 40),
    ({"max_batch_size": 100, "max_prefill_token_num": 64}, 90),
    ({"max_batch_size": 64, "cache_bytes": None}, 30),  # of NUM_BLOCKS blocks: preempts
    ({"max_batch_size": 3, "enable_prefix_caching": True}, 5),
]


def test_the_cpu_refuses_it(tmp_path: Path) -> None:
    model_dir = convert_tiny(tmp_path, "grouped-query").model_dir
    with pytest.raises(ConfigError, match="deterministic is true, which needs a GPU"):
        LocalEngine(model_dir, EngineConfig(device="cpu", deterministic=True))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_five_times_the_same_ids(family: str, tmp_path: Path) -> None:
    model_dir = convert_family(tmp_path, family).model_dir
    generator = random.Random(0)
    watched = [(_prompt(generator), _params(seed)) for seed in range(NUM_REQUESTS)]
    answers, block_bytes = [], 0
    for settings, num_others in ROUNDS:
        if "cache_bytes" in settings:
            settings = settings | {"cache_bytes": NUM_BLOCKS * block_bytes}
        requests = watched + [(_prompt(generator), _params(seed + 1)) for seed in range(num_others)]
        order = list(range(len(requests)))
        generator.shuffle(order)
        config = EngineConfig(dtype="bfloat16", deterministic=True, **{"enable_prefix_caching": False} | settings)
        with LocalEngine(model_dir, config) as engine:
            shuffled = [requests[index] for index in order]
            ids = [each.ids for each in engine.generate([p for p, _ in shuffled], [params for _, params in shuffled])]
            preempts = engine.engine.scheduler.num_preemptions
            block_bytes = engine.summary.cache_bytes // engine.summary.num_blocks
        assert (preempts > 0) == ("cache_bytes" in settings)
        answers.append([ids[order.index(index)] for index in range(NUM_REQUESTS)])
    for number, answer in enumerate(answers[1:], start=1):
        assert answer == answers[0], f"round {number} differs"


def _prompt(generator: random.Random) -> list[int]:
    length = generator.choice((3, 40, 64, 100, 300))
    start = [7] * generator.choice((0, 70))  # a beginning that several share
    return start + [generator.randrange(2, BASE["vocab_size"]) for _ in range(length)]


def _params(seed: int) -> SamplingParams:
    """Greedy, but for every fourth."""
    temperature = 1.0 if seed % 4 == 3 else 0.0
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=60, ignore_eos=True)
