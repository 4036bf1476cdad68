"""Every shape of the Llama family gives transformers' ids, from the Hugging Face folder by way of the converter."""

from pathlib import Path

import pytest

from limpet.backend.config import EngineConfig
from limpet.backend.engine import Engine
from limpet.backend.offline import LocalEngine
from limpet.backend.sampling_params import SamplingParams
from tests.aids.ids_equal import assert_ids_equal
from tests.aids.tiny import BASE, TINY_SHAPES
from tests.aids.tiny_models import ConvertedTiny, convert_tiny
from tests.aids.transformers_reference import greedy_reference

NUM_TOKENS = 40
# Around the borders of blocks and chunks of 16, and a prompt of one token.
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 100)


def prompts() -> list[list[int]]:
    return [[(7 * length + 13 * place) % BASE["vocab_size"] for place in range(length)] for length in PROMPT_LENGTHS]


def generate(engine: LocalEngine, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return [completion.ids for completion in engine.generate(prompts, params)]


def check_all(tiny: ConvertedTiny, config: EngineConfig) -> Engine:
    """Compare all prompts in one batch; returns the engine, closed, to look at its counters."""
    with LocalEngine(tiny.model_dir, config) as local:
        answers = generate(local, prompts(), NUM_TOKENS)
        for prompt, ids in zip(prompts(), answers, strict=True):
            assert_ids_equal(
                ids,
                greedy_reference(tiny.reference, prompt, NUM_TOKENS),
                prompt=prompt,
                generate=lambda prompt, num_tokens: generate(local, [prompt], num_tokens)[0],
                name=f"prompt of {len(prompt)}",
            )
    local.engine.check_integrity()
    return local.engine


@pytest.mark.parametrize("shape", TINY_SHAPES)
def test_ids_equal_transformers(tmp_path: Path, shape: str) -> None:
    check_all(convert_tiny(tmp_path, shape), EngineConfig(cache_block_seq_len=16, max_prefill_token_num=24))


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_ids_equal_transformers_at_every_block_size(tmp_path: Path, block_size: int) -> None:
    config = EngineConfig(cache_block_seq_len=block_size)  # type: ignore[arg-type]
    check_all(convert_tiny(tmp_path, "grouped-query"), config)


def test_ids_equal_transformers_without_prefix_caching(tmp_path: Path) -> None:
    config = EngineConfig(cache_block_seq_len=16, enable_prefix_caching=False, max_batch_size=3)
    check_all(convert_tiny(tmp_path, "grouped-query"), config)


def test_a_checkpoint_in_many_files_gives_the_same_ids(tmp_path: Path) -> None:
    tiny = convert_tiny(tmp_path, "biases", max_shard_size="20KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 3
    check_all(tiny, EngineConfig())


def test_answers_stay_equal_when_the_cache_holds_a_third_of_them(tmp_path: Path) -> None:
    """Preemption by recompute: nine requests want 607 tokens in all, the cache holds 192."""
    block_bytes = 2 * 2 * 16 * 2 * 8 * 4  # keys and values, layers, tokens, K/V heads, head size, float32
    config = EngineConfig(cache_block_seq_len=16, cache_bytes=12 * block_bytes)
    engine = check_all(convert_tiny(tmp_path, "grouped-query"), config)
    assert engine.scheduler.num_preemptions > 0
