"""Logprobs: log_softmax of transformers' raw logits, whatever is sampled, cached, cut into chunks or preempted."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from limpet.backend.config import EngineConfig
from limpet.backend.core import SequenceOutput
from limpet.backend.link.messages import TokenLogprob
from limpet.backend.offline import LocalEngine, new_sequence
from limpet.backend.sampling_params import SamplingParams
from tests.aids.tiny import one_thread
from tests.aids.tiny_models import ConvertedTiny, convert_tiny

BLOCK_BYTES = 2 * 2 * 2 * 8 * 16 * 4  # K and V, layers, K/V heads, head_dim, tokens, float32
TOLERANCE = 1e-3
PROMPT = [(7 * column) % 290 + 4 for column in range(45)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConvertedTiny]:
    with one_thread():
        yield convert_tiny(tmp_path_factory.mktemp("logprobs"), "grouped-query")


def engine_of(tiny: ConvertedTiny, num_blocks: int = 200, max_prefill: int = 512) -> LocalEngine:
    config = EngineConfig(
        max_batch_size=8,
        cache_block_seq_len=16,
        cache_bytes=num_blocks * BLOCK_BYTES,
        max_prefill_token_num=max_prefill,
    )
    return LocalEngine(tiny.model_dir, config)


def asking(**settings: object) -> SamplingParams:
    defaults = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    return SamplingParams(**defaults | settings)  # type: ignore[arg-type]


def run(local: LocalEngine, prompts: list[list[int]], each: list[SamplingParams]) -> list[list[SequenceOutput]]:
    """All outputs of each request."""
    pairs = zip(prompts, each, strict=True)
    sequences = [new_sequence(n, prompt, params, frozenset()) for n, (prompt, params) in enumerate(pairs)]
    for sequence in sequences:
        local.engine.add(sequence)
    outputs: list[list[SequenceOutput]] = [[] for _ in sequences]
    while local.engine.has_work:
        for output in local.engine.step():
            assert output.error is None
            outputs[sequences.index(output.sequence)].append(output)
    return outputs


def raw_logprobs(tiny: ConvertedTiny, ids: list[int]) -> Tensor:
    """Entry i is the distribution of the id at i + 1. # [len(ids), vocab]"""
    with torch.inference_mode():
        return tiny.reference(torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)


def check(entries: list[TokenLogprob], ids: list[int], expected: Tensor, num_top: int) -> None:
    assert len(entries) == len(ids) == len(expected)
    for entry, token, row in zip(entries, ids, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
        assert (
            abs(entry.rank - 1 - int((row > row[token]).sum())) <= int(((row - row[token]).abs() < TOLERANCE).sum()) - 1
        )
        best = row.topk(num_top)
        assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=TOLERANCE)
        assert [float(row[top]) for top in entry.top_ids] == pytest.approx(best.values.tolist(), abs=TOLERANCE)


def check_answer(tiny: ConvertedTiny, prompt: list[int], outputs: list[SequenceOutput], num_top: int) -> None:
    ids = [token for output in outputs for token in output.ids]
    entries = [entry for output in outputs for entry in output.logprobs]
    check(entries, ids, raw_logprobs(tiny, prompt + ids)[len(prompt) - 1 : -1], num_top)


def test_sampled_logprobs_alone_and_beside_others(tiny: ConvertedTiny) -> None:
    each = [
        asking(logprobs=0),
        asking(logprobs=5, top_k=1, temperature=1.0),
        asking(logprobs=20, temperature=0.7, top_p=0.3, seed=3),
        asking(logprobs=2, repetition_penalty=3.0, presence_penalty=9.0),
        asking(),
        asking(logprobs=1, logit_bias=((9, 100.0),)),
        asking(logprobs=3, temperature=5.0, seed=8),
        asking(temperature=1.0, seed=2),
    ]
    prompts = [PROMPT[: 20 + n] for n in range(8)]
    with engine_of(tiny) as local:
        together = run(local, prompts, each)
        alone = [run(local, [prompt], [params])[0] for prompt, params in zip(prompts, each, strict=True)]
    for prompt, params, *answers in zip(prompts, each, together, alone, strict=True):
        for outputs in answers:
            if params.logprobs is None:
                assert not [output for output in outputs if output.logprobs]
            else:
                check_answer(tiny, prompt, outputs, params.logprobs)


@pytest.mark.parametrize("max_prefill", [512, 7])
def test_prompt_logprobs_the_second_time_too(tiny: ConvertedTiny, max_prefill: int) -> None:
    expected = raw_logprobs(tiny, PROMPT)[:-1]
    with engine_of(tiny, max_prefill=max_prefill) as local:
        for _ in range(2):
            [outputs] = run(local, [PROMPT], [asking(prompt_logprobs=4)])
            check(outputs[0].prompt_logprobs, PROMPT[1:], expected, 4)
            assert not [output for output in outputs[1:] if output.prompt_logprobs]
            assert outputs[0].sequence.num_cached == 0
        [outputs] = run(local, [PROMPT], [asking()])
        assert outputs[0].sequence.num_cached == 32, "others still find the prompt in the cache"


def test_prompt_of_one_token_has_no_logprobs(tiny: ConvertedTiny) -> None:
    with engine_of(tiny) as local:
        [outputs] = run(local, [[5]], [asking(prompt_logprobs=4, logprobs=0)])
    assert outputs[0].prompt_logprobs == []
    check_answer(tiny, [5], outputs, 0)


def test_logprobs_survive_preemption(tiny: ConvertedTiny) -> None:
    prompts = [[(7 * row + 3 * column) % 290 + 4 for column in range(14)] for row in range(6)]
    with engine_of(tiny, num_blocks=12) as local:
        answers = run(local, prompts, [asking(max_tokens=70, logprobs=2, prompt_logprobs=1)] * 6)
        assert local.engine.scheduler.num_preemptions >= 3
    for prompt, outputs in zip(prompts, answers, strict=True):
        check_answer(tiny, prompt, outputs, 2)
        prompt_entries = [entry for output in outputs for entry in output.prompt_logprobs]
        check(prompt_entries, prompt[1:], raw_logprobs(tiny, prompt)[:-1], 1)


def test_asking_for_logprobs_changes_no_id(tiny: ConvertedTiny) -> None:
    with engine_of(tiny) as local:
        plain, asked = run(local, [PROMPT] * 2, [asking(), asking(logprobs=20, prompt_logprobs=20)])
    assert [output.ids for output in plain] == [output.ids for output in asked]
