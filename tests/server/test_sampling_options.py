"""Sampling options through tritonserver change the ids as transformers' processors do: alone, together, streamed."""

import json
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.aids.chain_tokenizer import EOS_ID, SPECIAL_TOKENS, byte_characters
from tests.aids.live_server import LiveServer
from tests.aids.tiny import build_tiny, one_thread
from tests.aids.wire import Response, ids_of, wire

pytestmark = pytest.mark.server
PROMPT = [5, 17, 123, 44, 17, 5, 200, 81]
NUM_TOKENS = 24
FIRST_VISIBLE = len(SPECIAL_TOKENS)  # "!" and the 93 characters after it are tokens of their own
SPACE = FIRST_VISIBLE + list(byte_characters()).index(ord(" "))
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}


Cases = list[tuple[dict[str, Any], list[int]]]  # requests and their ids


class AnswerPenalties:
    """OpenAI's presence and frequency penalties, which transformers has not."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for token, count in Counter(ids[0, len(PROMPT) :].tolist()).items():
            scores[0, token] -= self._presence + self._frequency * count
        return scores


class SeededNoise:
    """What is added to draw instead of taking the likeliest: Gumbel noise by splitmix64 of (seed, position, id)."""

    GOLDEN, MASK = 0x9E3779B97F4A7C15, 2**64 - 1

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        key = self._mix(self._seed + self._mix(ids.shape[1] * self.GOLDEN + self.GOLDEN))
        bits = [self._mix(key + token * self.GOLDEN) & 0x7FFFFF for token in range(scores.shape[1])]
        return scores - torch.tensor([-math.log((each + 0.5) / 2**23) for each in bits]).log()

    def _mix(self, x: int) -> int:
        x &= self.MASK
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & self.MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & self.MASK
        return x ^ (x >> 31)


def reference(processors: list[Any], stop_ids: tuple[int, ...] = (), prompt: list[int] = PROMPT) -> list[int]:
    model, ids = build_tiny(), list(prompt)
    with one_thread(), torch.inference_mode():
        while len(ids) < len(prompt) + NUM_TOKENS and not (len(ids) > len(prompt) and ids[-1] in stop_ids):
            scores = model(torch.tensor([ids])).logits[:, -1]
            ids.append(int(LogitsProcessorList(processors)(torch.tensor([ids]), scores).argmax()))
    return ids[len(prompt) :]


def biased(bias: dict[str, float]) -> SequenceBiasLogitsProcessor:
    return SequenceBiasLogitsProcessor([[[int(token)], float(value)] for token, value in bias.items()])


def sampling(**options: Any) -> dict[str, str]:
    return {"sampling_parameters": json.dumps(options)}


def is_visible(token: int) -> bool:
    return FIRST_VISIBLE <= token < FIRST_VISIBLE + 94


def text_of_visible(tokens: list[int]) -> str:
    return "".join(chr(ord("!") + token - FIRST_VISIBLE) for token in tokens)


@pytest.fixture(scope="module")
def plain() -> list[int]:
    return reference([])


@pytest.fixture(scope="module")
def ruled(plain: list[int]) -> Cases:
    """What changes the logits."""
    ends = (plain[1], plain[3])
    bias = {str(plain[0]): -60, "222": 3.5}
    token = next(token for token in plain if is_visible(token))
    words = [[token], [SPACE, token]]
    return [
        (sampling(logprobs=2, prompt_logprobs=1), plain),
        ({"repetition_penalty": 5.0}, reference([RepetitionPenaltyLogitsProcessor(5.0)])),
        ({"presence_penalty": 50.0}, reference([AnswerPenalties(50.0, 0.0)])),
        ({"frequency_penalty": 1.5}, reference([AnswerPenalties(0.0, 1.5)])),
        (sampling(logit_bias=bias), reference([biased(bias)])),
        ({"bad_words": [text_of_visible([token]).encode()]}, reference([NoBadWordsLogitsProcessor(words, [299])])),
        (
            sampling(stop_token_ids=ends) | {"min_tokens": 9},
            reference([MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, list(ends))], ends),
        ),
        ({"temperature": 0.05, "seed": 4}, reference([TemperatureLogitsWarper(0.05), SeededNoise(4)])),
    ]


@pytest.fixture(scope="module")
def drawn() -> Cases:
    """What changes the draw; the hot one alone differs from each with a filter or another seed."""
    hot, last = TemperatureLogitsWarper(5.0), 2**64 - 1
    warm = {"temperature": 5.0, "seed": 4}
    return [
        (warm, reference([hot, SeededNoise(4)])),
        (warm | {"seed": last}, reference([hot, SeededNoise(last)])),
        (warm | {"temperature": 0.6}, reference([TemperatureLogitsWarper(0.6), SeededNoise(4)])),
        (warm | {"top_k": 2}, reference([hot, TopKLogitsWarper(2), SeededNoise(4)])),
        (warm | {"top_p": 0.03}, reference([hot, TopPLogitsWarper(0.03), SeededNoise(4)])),
        (warm | {"min_p": 0.7}, reference([hot, MinPLogitsWarper(0.7), SeededNoise(4)])),
        (
            warm | {"top_k": 40, "top_p": 0.5, "min_p": 0.4},
            reference([hot, TopKLogitsWarper(40), TopPLogitsWarper(0.5), MinPLogitsWarper(0.4), SeededNoise(4)]),
        ),
        (warm | {"top_p": 0.0}, reference([])),
    ]


@pytest.fixture(scope="module")
def ended(plain: list[int]) -> Cases:
    """What ends an answer: no more ids than up to there, the same as without."""
    end = {str(EOS_ID): 100.0}
    place = next(
        place for place in range(1, NUM_TOKENS) if all(is_visible(token) for token in plain[place : place + 2])
    )
    word = text_of_visible(plain[place : place + 2])
    end_id = plain[5]
    return [
        ({"ignore_eos": False, "end_id": end_id}, reference([], (end_id,))),
        ({"ignore_eos": False, "end_id": 2**31 - 1} | sampling(logit_bias=end), [EOS_ID] * NUM_TOKENS),
        ({"ignore_eos": True} | sampling(logit_bias=end), [EOS_ID] * NUM_TOKENS),
        ({"ignore_eos": False} | sampling(logit_bias=end), [EOS_ID]),
        (
            {"ignore_eos": False, "min_tokens": 3} | sampling(logit_bias=end),
            reference([MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, [EOS_ID]), biased(end)], (EOS_ID,)),
        ),
        ({"stop_words": [word.encode()]}, plain[:place]),
        ({"max_tokens": 3}, plain[:3]),
        (sampling(stop_token_ids=[plain[7]]), reference([], (plain[7],))),
    ]


def ask(server: LiveServer, settings: dict[str, Any], *, stream: bool) -> list[Response]:
    with wire(server.target, "tiny") as client:
        responses = client.ask(input_ids=PROMPT, stream=stream, return_output_ids=True, **GREEDY | settings)
    assert not [response.error for response in responses if response.error]
    return responses


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", ["ruled", "drawn", "ended"])
def test_eight_options_alone_and_at_once(
    tiny: LiveServer, request: pytest.FixtureRequest, kind: str, stream: bool
) -> None:
    cases: Cases = request.getfixturevalue(kind)
    expected = [ids for _, ids in cases]
    assert [ids_of(ask(tiny, settings, stream=stream)) for settings, _ in cases] == expected
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda case: ids_of(ask(tiny, case[0], stream=stream)), cases)) == expected


def test_every_option_changes_ids(plain: list[int], ruled: Cases, drawn: Cases, ended: Cases) -> None:
    """An option that changes nothing proves nothing."""
    assert [ids == plain for _, ids in ruled] == [True, *[False] * 7]
    assert len({tuple(ids) for _, ids in drawn}) == 8
    assert plain not in [ids for _, ids in ended]


@pytest.mark.parametrize("stream", [True, False])
def test_repetition_penalty_counts_a_sessions_history(tiny: LiveServer, plain: list[int], stream: bool) -> None:
    turn = [9, 77, 150]
    history = PROMPT + plain + turn
    expected = reference([RepetitionPenaltyLogitsProcessor(5.0)], prompt=history)
    assert expected != reference([RepetitionPenaltyLogitsProcessor(5.0)], prompt=turn)
    session = {"sequence_id": f"history-{stream}"}
    with wire(tiny.target, "tiny") as client:
        common: dict[str, Any] = {"stream": stream, "return_output_ids": True} | GREEDY | session
        assert ids_of(client.ask(input_ids=PROMPT, sequence_start=True, **common)) == plain
        assert ids_of(client.ask(input_ids=turn, repetition_penalty=5.0, sequence_end=True, **common)) == expected


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_of_prompt_and_answer(tiny: LiveServer, plain: list[int], stream: bool) -> None:
    asked = {"sampling_parameters": json.dumps({"logprobs": 5, "prompt_logprobs": 1, "top_k": 1})}
    for _ in range(2):
        responses = ask(tiny, asked | {"return_log_probs": True, "return_cumulative_logprob": True}, stream=stream)
        ids = ids_of(responses)
        assert ids == plain
        with torch.inference_mode():
            raw = build_tiny()(torch.tensor([PROMPT + ids])).logits[0].log_softmax(-1)
        answer = [entry for response in responses for entry in json.loads(response.outputs["logprobs"][0])]
        [prompt] = [json.loads(r.outputs["prompt_logprobs"][0]) for r in responses if "prompt_logprobs" in r.outputs]
        assert prompt[0] is None
        assert len(answer) == len(ids)
        found = [entry[str(token)] for entry, token in zip([*prompt[1:], *answer], [*PROMPT, *ids][1:], strict=True)]
        wanted = [float(raw[at, token]) for at, token in enumerate([*PROMPT, *ids][1:])]
        assert [entry["logprob"] for entry in found] == pytest.approx(wanted, abs=1e-3)
        assert all(entry["rank"] == 1 for entry in found[len(PROMPT) - 1 :])
        assert all(len(entry) == 5 for entry in answer)
        styles = [value for response in responses for value in response.outputs["output_log_probs"]]
        assert styles == pytest.approx(wanted[len(PROMPT) - 1 :], abs=1e-3)
        total = pytest.approx(sum(wanted[len(PROMPT) - 1 :]), abs=1e-2)
        assert responses[-1].outputs["cumulative_logprob"] == [total]
        assert responses[-1].outputs["cum_log_probs"] == [total]
