"""Penalties, bias and banned ids: what transformers' own processors make of transformers' logits, id for id."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from limpet.backend.config import EngineConfig
from limpet.backend.core import RequestError
from limpet.backend.offline import LocalEngine
from limpet.backend.sampling_params import SamplingParams
from tests.aids.tiny import one_thread
from tests.aids.tiny_models import ConvertedTiny, convert_tiny

BLOCK_BYTES = 2 * 2 * 2 * 8 * 16 * 4  # K and V, layers, K/V heads, head_dim, tokens, float32
NUM_TOKENS = 40
PROMPT = [5, 17, 123, 44, 17, 5, 200, 81]
Processor = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """Settings, and the processors that mean the same."""

    settings: dict[str, Any]
    processors: list[Processor]
    prompt: list[int] = field(default_factory=lambda: PROMPT)


def answer_penalties(presence: float, frequency: float) -> Processor:
    """OpenAI's definition over the ids after the prompt; transformers has none."""

    def process(ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for token, count in Counter(ids[0, len(PROMPT) :].tolist()).items():
            scores[0, token] -= presence + frequency * count
        return scores

    return process


def reference_ids(model: PreTrainedModel, case: Case, stop_ids: frozenset[int] = frozenset()) -> list[int]:
    """Greedy ids of the processed float32 logits."""
    ids = list(case.prompt)
    while len(ids) < len(case.prompt) + NUM_TOKENS and not (len(ids) > len(case.prompt) and ids[-1] in stop_ids):
        given = torch.tensor([ids])
        with torch.inference_mode():
            scores = model(given).logits[:, -1].float()
        for process in case.processors:
            scores = process(given, scores)
        ids.append(int(scores.argmax()))
    return ids[len(case.prompt) :]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConvertedTiny]:
    with one_thread():
        yield convert_tiny(tmp_path_factory.mktemp("rules"), "grouped-query")


@pytest.fixture(scope="module")
def plain(tiny: ConvertedTiny) -> list[int]:
    """The answer without any rule."""
    return reference_ids(tiny.reference, Case({}, []))


def engine_of(tiny: ConvertedTiny, num_blocks: int = 200) -> LocalEngine:
    config = EngineConfig(max_batch_size=8, cache_block_seq_len=16, cache_bytes=num_blocks * BLOCK_BYTES)
    return LocalEngine(tiny.model_dir, config)


def params_of(case: Case) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **case.settings})


@pytest.fixture(scope="module")
def cases(plain: list[int]) -> dict[str, Case]:
    """Eight settings of which each changes the plain answer."""
    words = [plain[1:3], plain[5:8], [plain[10]]]
    bias = {plain[0]: -50.0, 222: 4.0}
    never = NoBadWordsLogitsProcessor(words, eos_token_id=[299])
    biased = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    return {
        "repetition": Case({"repetition_penalty": 5.0}, [RepetitionPenaltyLogitsProcessor(5.0)]),
        "repetition wanted": Case({"repetition_penalty": 0.2}, [RepetitionPenaltyLogitsProcessor(0.2)]),
        "presence": Case({"presence_penalty": 50.0}, [answer_penalties(50.0, 0.0)]),
        "presence wanted": Case({"presence_penalty": -50.0}, [answer_penalties(-50.0, 0.0)]),
        "frequency": Case({"frequency_penalty": 1.5}, [answer_penalties(0.0, 1.5)]),
        "bad words": Case({"bad_words": tuple(map(tuple, words))}, [never]),
        "bias": Case({"logit_bias": tuple(bias.items())}, [biased]),
        "all": Case(
            {
                "repetition_penalty": 1.3,
                "presence_penalty": 0.7,
                "frequency_penalty": 0.4,
                "bad_words": tuple(map(tuple, words)),
                "logit_bias": tuple(bias.items()),
            },
            [biased, RepetitionPenaltyLogitsProcessor(1.3), answer_penalties(0.7, 0.4), never],
        ),
    }


def test_each_rule_alone_and_all_in_one_batch(tiny: ConvertedTiny, cases: dict[str, Case], plain: list[int]) -> None:
    expected = {name: reference_ids(tiny.reference, case) for name, case in cases.items()}
    assert all(ids != plain for ids in expected.values()), "a rule that changes nothing proves nothing"
    with engine_of(tiny) as engine:
        for name, case in cases.items():
            assert engine.generate([case.prompt], params_of(case))[0].ids == expected[name], name
        together = engine.generate([case.prompt for case in cases.values()], [params_of(c) for c in cases.values()])
        assert {name: answer.ids for name, answer in zip(cases, together, strict=True)} == expected
        assert engine.generate([PROMPT], params_of(Case({}, [])))[0].ids == plain, "a row kept its last owner's rules"


def test_rules_survive_preemption(tiny: ConvertedTiny, cases: dict[str, Case]) -> None:
    expected = [reference_ids(tiny.reference, case) for case in cases.values()]
    with engine_of(tiny, num_blocks=9) as engine:
        answers = engine.generate([case.prompt for case in cases.values()], [params_of(c) for c in cases.values()])
        assert engine.engine.scheduler.num_preemptions >= 2
    assert [answer.ids for answer in answers] == expected


def test_min_tokens_holds_back_every_end_id(tiny: ConvertedTiny, plain: list[int]) -> None:
    ends = (plain[2], plain[4])
    early = Case({"stop_token_ids": ends}, [])
    late = Case(
        {"stop_token_ids": ends, "min_tokens": 20}, [MinNewTokensLengthLogitsProcessor(len(PROMPT), 20, list(ends))]
    )
    with engine_of(tiny) as engine:
        answers = engine.generate([PROMPT, PROMPT], [params_of(early), params_of(late)])
    assert answers[0].ids == plain[:3]
    assert answers[1].ids == reference_ids(tiny.reference, late, frozenset(ends))
    assert len(answers[1].ids) >= 20


def test_an_end_id_past_the_vocabulary_bans_nothing_of_the_neighbour(tiny: ConvertedTiny, plain: list[int]) -> None:
    vocab_size = tiny.reference.config.vocab_size
    ends = (vocab_size + plain[0], 10 * vocab_size)
    held = Case({"stop_token_ids": ends, "min_tokens": 20}, [])
    with engine_of(tiny) as engine:
        answers = engine.generate([PROMPT, PROMPT], [params_of(held), params_of(Case({}, []))])
    assert [answer.ids for answer in answers] == [plain, plain]


def test_presence_penalty_does_not_count_the_prompt(tiny: ConvertedTiny, plain: list[int]) -> None:
    prompt = [*PROMPT, *[plain[0]] * 3]
    case = Case({"presence_penalty": 100.0}, [], prompt)
    with engine_of(tiny) as engine:
        [answer] = engine.generate([prompt], params_of(case))
    assert answer.ids[0] == reference_ids(tiny.reference, Case({}, [], prompt))[0]


def test_sampled_ids_with_rules_are_a_requests_own(tiny: ConvertedTiny, cases: dict[str, Case]) -> None:
    each = [
        params_of(Case({**case.settings, "temperature": 1.2, "seed": seed, "top_p": 0.9}, []))
        for seed, case in enumerate(cases.values())
    ]
    with engine_of(tiny) as engine:
        alone = [engine.generate([PROMPT], params)[0].ids for params in each]
        assert [answer.ids for answer in engine.generate([PROMPT] * 8, each)] == alone


def test_a_request_that_forbids_every_id_fails_alone(tiny: ConvertedTiny, plain: list[int]) -> None:
    nothing = params_of(Case({"bad_words": tuple((token,) for token in range(300))}, []))
    with engine_of(tiny) as engine:
        with pytest.raises(RequestError, match="No token is left to choose"):
            engine.generate([PROMPT], nothing)
        assert engine.generate([PROMPT], params_of(Case({}, [])))[0].ids == plain
