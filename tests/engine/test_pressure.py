"""Short memory changes when answers come, never what they say."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from limpet.backend.config import EngineConfig
from limpet.backend.core import RequestError
from limpet.backend.offline import LocalEngine, new_sequence
from limpet.backend.sampling_params import SamplingParams
from limpet.converter.convert import convert
from limpet.converter.plan import Options, make_plan
from tests.aids.tiny import one_thread, write_tiny
from tests.aids.transformers_reference import greedy_reference

BLOCK_BYTES = 2 * 2 * 2 * 8 * 16 * 4  # K and V, layers, K/V heads, head_dim, tokens, float32


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, PreTrainedModel]]:
    """A converted model and its reference."""
    source, workspace = tmp_path_factory.mktemp("tiny"), tmp_path_factory.mktemp("workspace")
    reference = write_tiny(source)
    convert(make_plan(Options(source=source, workspace=workspace, name="tiny")), lambda num_bytes: None)
    with one_thread():
        yield workspace / "model_repository" / "tiny", reference


def engine_of(tiny: tuple[Path, PreTrainedModel], num_blocks: int, **settings: object) -> LocalEngine:
    config = EngineConfig(
        cache_block_seq_len=16,
        cache_bytes=num_blocks * BLOCK_BYTES,
        **{"max_batch_size": 8, **settings},  # type: ignore[arg-type]
    )
    return LocalEngine(tiny[0], config)


def prompts(count: int, length: int) -> list[list[int]]:
    return [[(7 * row + 3 * column) % 290 + 4 for column in range(length)] for row in range(count)]


GREEDY = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_requests_get_their_uncontended_ids(tiny: tuple[Path, PreTrainedModel], prefix_caching: bool) -> None:
    asked = prompts(6, 14)
    with engine_of(tiny, num_blocks=12, enable_prefix_caching=prefix_caching) as engine:
        answers = engine.generate(asked, GREEDY)
        assert engine.engine.scheduler.num_preemptions >= 3
        engine.engine.check_integrity()
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer.ids == greedy_reference(tiny[1], prompt, 70).ids


def test_preempted_sampled_requests_keep_their_seeds(tiny: tuple[Path, PreTrainedModel]) -> None:
    asked = prompts(6, 14)
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=70, ignore_eos=True) for seed in range(6)]
    with engine_of(tiny, num_blocks=200) as roomy, engine_of(tiny, num_blocks=12) as tight:
        expected = [answer.ids for answer in roomy.generate(asked, params)]
        assert [answer.ids for answer in tight.generate(asked, params)] == expected
        assert roomy.engine.scheduler.num_preemptions == 0
        assert tight.engine.scheduler.num_preemptions >= 3


def test_preemptions_of_one_request_are_bounded_by_its_blocks(tiny: tuple[Path, PreTrainedModel]) -> None:
    """Each time a request runs it gains at least a block of tokens before it can be set back again."""
    with engine_of(tiny, num_blocks=12) as engine:
        engine.generate(prompts(6, 14), GREEDY)
        num_preemptions = engine.engine.scheduler.num_preemptions
    assert num_preemptions <= 6 * (84 // 16)


@pytest.mark.parametrize("length", [159, 160, 161])
def test_prompt_as_long_as_the_pool(tiny: tuple[Path, PreTrainedModel], length: int) -> None:
    [prompt] = prompts(1, length)
    with engine_of(tiny, num_blocks=10) as engine:
        assert engine.summary.session_len == 160
        if length < 160:
            [answer] = engine.generate([prompt], GREEDY)
            assert (answer.ids, answer.finish_reason) == (greedy_reference(tiny[1], prompt, 1).ids, "context_full")
        else:
            with pytest.raises(RequestError, match=f"{length} tokens.*at most 159"):
                engine.generate([prompt], GREEDY)
        assert len(engine.generate(prompts(1, 5), GREEDY)[0].ids) == 70


def test_two_prompts_of_more_than_half_the_pool_both_end(tiny: tuple[Path, PreTrainedModel]) -> None:
    asked = prompts(2, 88)
    with engine_of(tiny, num_blocks=10) as engine:
        answers = engine.generate(asked, GREEDY)
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer.ids == greedy_reference(tiny[1], prompt, 70).ids


def test_running_answers_go_on_while_long_prompts_arrive(tiny: tuple[Path, PreTrainedModel]) -> None:
    """Decode first: one more token for the short request in every step that reads a piece of the long prompts."""
    with engine_of(tiny, num_blocks=100, max_prefill_token_num=16) as local:
        engine = local.engine
        short = new_sequence("short", prompts(1, 5)[0], GREEDY, frozenset())
        engine.add(short)
        while not short.num_generated:
            engine.step()
        for prompt in prompts(3, 200):
            engine.add(new_sequence("long", prompt, GREEDY, frozenset()))
        generated = short.num_generated
        for _ in range(20):
            engine.step()
            assert short.num_generated == generated + 1
            generated += 1
        while engine.has_work:
            engine.step()


def test_smaller_priority_is_served_first_and_equals_in_order_of_arrival(
    tiny: tuple[Path, PreTrainedModel],
) -> None:
    with engine_of(tiny, num_blocks=100, max_batch_size=1) as local:
        for name, priority in (("first", 0), ("late", 7), ("urgent", -3), ("second", 0), ("third", 0)):
            sequence = new_sequence(name, prompts(1, 5)[0], SamplingParams(max_tokens=2), frozenset())
            sequence.priority = priority
            local.engine.add(sequence)
        ended = []
        while local.engine.has_work:
            ended += [output.sequence.key for output in local.engine.step() if output.ends]
    assert ended == ["urgent", "first", "second", "third", "late"]


@pytest.mark.parametrize("shared", [15, 16, 17, 31, 32, 33])
def test_prefix_hits_at_block_edges_change_no_id(tiny: tuple[Path, PreTrainedModel], shared: int) -> None:
    first, second = prompts(2, 40)
    second = first[:shared] + second[shared:]
    with engine_of(tiny, num_blocks=100) as engine:
        engine.generate([first], GREEDY)
        [answer] = engine.generate([second], GREEDY)
        [again] = engine.generate([second[:32]], GREEDY)
    assert answer.num_cached_tokens == shared // 16 * 16
    assert answer.ids == greedy_reference(tiny[1], second, 70).ids
    assert again.num_cached_tokens == 16, "a prompt that is cached whole leaves its last block to compute"
    assert again.ids == greedy_reference(tiny[1], second[:32], 70).ids
