"""The engine's greedy ids of a real model equal transformers' in float32: alone, in one batch, however cut up."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from limpet.backend.config import EngineConfig
from limpet.backend.offline import Completion, LocalEngine
from limpet.backend.sampling_params import SamplingParams
from tests.aids.ids_equal import assert_ids_equal
from tests.aids.reference import ReferencePrompt, smollm2_references

REFERENCES = smollm2_references()
WHOLE, CHUNKED = 8192, 40  # most prompt tokens of a step: all of them, or less than most prompts have


def open_engine(model_dir: Path, block_size: int, prefill_tokens: int) -> LocalEngine:
    config = EngineConfig(
        max_batch_size=len(REFERENCES),
        session_len=512,
        cache_bytes=400 << 20,
        cache_block_seq_len=block_size,  # type: ignore[arg-type]
        max_prefill_token_num=prefill_tokens,
    )
    return LocalEngine(model_dir, config)


def greedy(engine: LocalEngine, prompts: list[list[int]], num_tokens: int) -> list[Completion]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return engine.generate(prompts, params)


def check(engine: LocalEngine, case: ReferencePrompt, completion: Completion) -> None:
    def generate(prompt: list[int], num_tokens: int) -> list[int]:
        return greedy(engine, [prompt], num_tokens)[0].ids

    assert completion.finish_reason == "length"
    assert_ids_equal(completion.ids, case.reference, prompt=case.prompt, generate=generate, name=case.name)


@pytest.mark.parametrize("prefill_tokens", [WHOLE, CHUNKED], ids=["whole", "chunked"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_one_batch_equals_transformers(smollm2_dir: Path, block_size: int, prefill_tokens: int) -> None:
    with open_engine(smollm2_dir, block_size, prefill_tokens) as engine:
        completions = greedy(engine, [case.prompt for case in REFERENCES], len(REFERENCES[0].reference.ids))
        for case, completion in zip(REFERENCES, completions, strict=True):
            check(engine, case, completion)


@pytest.fixture(scope="module")
def lone_engine(smollm2_dir: Path) -> Iterator[LocalEngine]:
    with open_engine(smollm2_dir, 64, WHOLE) as engine:
        yield engine


@pytest.mark.parametrize("case", REFERENCES, ids=lambda case: case.name)
def test_alone_equals_transformers(lone_engine: LocalEngine, case: ReferencePrompt) -> None:
    [completion] = greedy(lone_engine, [case.prompt], len(case.reference.ids))
    check(lone_engine, case, completion)


@pytest.mark.long
@pytest.mark.parametrize("prefill_tokens", [WHOLE, CHUNKED], ids=["whole", "chunked"])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_alone_in_blocks_and_chunks_equals_transformers(
    smollm2_dir: Path, block_size: int, prefill_tokens: int
) -> None:
    with open_engine(smollm2_dir, block_size, prefill_tokens) as engine:
        for case in REFERENCES:
            [completion] = greedy(engine, [case.prompt], len(case.reference.ids))
            check(engine, case, completion)
