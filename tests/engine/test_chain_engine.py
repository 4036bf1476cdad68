"""The chain checkpoint through the real engine: every script comes out to the last id."""

from collections.abc import Iterator

import pytest

from limpet.backend.config import EngineConfig
from limpet.backend.offline import LocalEngine
from limpet.backend.sampling_params import SamplingParams
from tests.aids.chain import answer_ids
from tests.aids.chain_checkpoint import write_chain_checkpoint
from tests.aids.chain_scripts import SCRIPTS
from tests.aids.chain_tokenizer import build_tokenizer

ENDING = [each.key for each in SCRIPTS if not each.loops]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    model_dir = tmp_path_factory.mktemp("chain") / "chain"
    write_chain_checkpoint(model_dir)
    with LocalEngine(model_dir, EngineConfig(cache_bytes=16 << 20)) as engine:
        yield engine


def prompt(key: str) -> list[int]:
    ids: list[int] = build_tokenizer().encode(f"Say {key}").ids
    return ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_script_is_answered_in_full(engine: LocalEngine, temperature: float) -> None:
    answers = engine.generate([prompt(key) for key in ENDING], SamplingParams(temperature=temperature))
    assert {key: answer.ids for key, answer in zip(ENDING, answers, strict=True)} == {
        key: answer_ids(key) for key in ENDING
    }
    assert {answer.finish_reason for answer in answers} == {"stop"}


def test_the_loop_goes_on_to_its_limit(engine: LocalEngine) -> None:
    once = answer_ids("loop")
    [answer] = engine.generate([prompt("loop")], SamplingParams(max_tokens=2 * len(once) + 5))
    assert answer.ids == 2 * once + once[:5]
    assert answer.finish_reason == "length"
