"""A model shared by two or four processes over gloo answers as one process does, and as transformers does.

Vocabularies of 300 ids are padded, two K/V heads are shared by four ranks, two shared experts split by four.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis.stateful import run_state_machine_as_test

from limpet.backend.build import build_engine
from limpet.backend.checkpoint import CheckpointDir
from limpet.backend.config import ConfigError, EngineConfig
from limpet.backend.engine import Engine
from limpet.backend.models.causal_lm import CausalLM
from limpet.backend.models.registry import build_model
from limpet.backend.offline import LocalEngine
from limpet.backend.ranks.group import RankGroup
from limpet.backend.sampling_params import SamplingParams
from limpet.backend.weights import num_bytes
from tests.aids.ids_equal import assert_ids_equal
from tests.aids.tiny import one_thread
from tests.aids.tiny_models import ConvertedTiny, convert_tiny
from tests.aids.transformers_reference import greedy_reference
from tests.engine.session_machine import SessionMachine, Totals
from tests.engine.test_logprobs import asking, check, check_answer, raw_logprobs, run
from tests.engine.test_session_machine import settings_for

SPLITS = [("grouped-query", 2), ("eight-heads", 4), ("lite", 2), ("v2", 4)]
PROMPTS = [[(7 * length + 13 * place) % 290 + 4 for place in range(length)] for length in (1, 15, 16, 17, 33, 100)]
NUM_TOKENS = 20
NUM_BLOCKS = 10  # fewer than the answers want together


class Shared(NamedTuple):
    """A model, and an engine in which ranks share it."""

    tiny: ConvertedTiny
    local: LocalEngine

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
        return [answer.ids for answer in self.local.generate(prompts, params)]


def part_of(tiny: ConvertedTiny, rank: int, size: int) -> CausalLM:
    """A rank's part of the model, of meta tensors."""
    config = CheckpointDir(tiny.model_dir).model_config()
    return build_model(config, 512, torch.device("meta"), torch.float32, RankGroup(rank, size))


def config_of(
    tiny: ConvertedTiny, size: int, *, num_blocks: int = NUM_BLOCKS, num_host_blocks: int = 0
) -> EngineConfig:
    """So many blocks of each rank's part of a cache."""
    block_bytes = part_of(tiny, 0, size).cache_layout.block_bytes(16, torch.float32)
    return EngineConfig(
        tp=size,
        device="cpu",
        max_batch_size=8,
        cache_block_seq_len=16,
        max_prefill_token_num=64,
        cache_bytes=num_blocks * block_bytes,
        host_cache_bytes=num_host_blocks * block_bytes,
    )


@pytest.mark.parametrize("num_steps", [100, pytest.param(3000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_sessions_in_any_order_of_events(tmp_path_factory: pytest.TempPathFactory, num_steps: int) -> None:
    """First: a process has one engine at a time whose model is shared."""
    tiny = convert_tiny(tmp_path_factory.mktemp("machine"), "grouped-query")

    class SharedMachine(SessionMachine):
        totals = Totals()

        def build_engine(self) -> Engine:
            return build_engine(tiny.model_dir, config_of(tiny, 2, num_blocks=6, num_host_blocks=6))[0]

        def next_id(self, tokens: list[int]) -> int:
            with torch.inference_mode():
                return int(tiny.reference(torch.tensor([tokens])).logits[0, -1].argmax())

    with one_thread():
        run_state_machine_as_test(SharedMachine, settings=settings_for(num_steps + 70, derandomize=num_steps < 1000))
    assert SharedMachine.totals.num_rules >= num_steps, SharedMachine.totals
    assert SharedMachine.totals.num_evictions > 0, SharedMachine.totals


@pytest.fixture(scope="module", params=SPLITS, ids=lambda split: f"{split[0]} on {split[1]}")
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    shape, size = request.param
    with one_thread():
        tiny = convert_tiny(tmp_path_factory.mktemp("ranks"), shape)
        with LocalEngine(tiny.model_dir, config_of(tiny, size)) as local:
            yield Shared(tiny, local)


def test_ids_equal_transformers_with_preemption_and_prefix_hits(shared: Shared) -> None:
    scheduler = shared.local.engine.scheduler
    before = scheduler.num_preemptions
    for prompt, ids in zip(PROMPTS, shared.generate(PROMPTS, asking(max_tokens=NUM_TOKENS)), strict=True):
        assert_ids_equal(
            ids,
            greedy_reference(shared.tiny.reference, prompt, NUM_TOKENS),
            prompt=prompt,
            generate=lambda prompt, count: shared.generate([prompt], asking(max_tokens=count))[0],
            name=f"prompt of {len(prompt)}",
        )
    assert scheduler.num_preemptions > before
    longer = [*PROMPTS[-1], 9]
    [again] = shared.local.generate([longer], asking())
    assert again.num_cached_tokens == 96
    assert again.ids == greedy_reference(shared.tiny.reference, longer, len(again.ids)).ids
    shared.local.engine.check_integrity()


def test_ranks_load_what_a_plan_of_meta_tensors_says(shared: Shared) -> None:
    size = shared.local.summary.tp
    parts = [num_bytes(part_of(shared.tiny, rank, size)) for rank in range(size)]
    assert shared.local.summary.weight_bytes == max(parts)
    assert max(parts) < num_bytes(part_of(shared.tiny, 0, 1))


def test_samples_equal_those_of_one_process(shared: Shared) -> None:
    params = asking(
        temperature=0.8, seed=3, top_k=40, repetition_penalty=1.2, bad_words=((7, 8),), logit_bias=((9, 2.0),)
    )
    with LocalEngine(shared.tiny.model_dir, config_of(shared.tiny, 1)) as alone:
        expected = [answer.ids for answer in alone.generate(PROMPTS, params)]
    assert shared.generate(PROMPTS, params) == expected


def test_logprobs_are_those_of_transformers(shared: Shared) -> None:
    params = asking(logprobs=3, prompt_logprobs=3)
    [outputs] = run(shared.local, [PROMPTS[-1]], [params])
    check_answer(shared.tiny, PROMPTS[-1], outputs, 3)
    check(outputs[0].prompt_logprobs, PROMPTS[-1][1:], raw_logprobs(shared.tiny, PROMPTS[-1])[:-1], 3)


@pytest.mark.parametrize(("shape", "size", "works"), [("grouped-query", 4, "1, 2 work"), ("v2", 3, "1, 2, 4 work")])
def test_a_degree_that_does_not_divide_names_those_that_do(
    tmp_path_factory: pytest.TempPathFactory, shape: str, size: int, works: str
) -> None:
    tiny = convert_tiny(tmp_path_factory.mktemp("degree"), shape)
    with pytest.raises(ConfigError, match=f"tp is {size}.*: {works}"):
        LocalEngine(tiny.model_dir, EngineConfig(tp=size, device="cpu"))
