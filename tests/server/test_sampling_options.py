"""Sampling options through tritonserver change the ids as transformers' processors do: alone, together, streamed."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tests.aids.chain_tokenizer import SPECIAL_TOKENS, byte_characters
from tests.aids.live_server import LiveServer
from tests.aids.tiny import build_tiny, one_thread
from tests.aids.wire import Response, ids_of, wire

pytestmark = pytest.mark.server
PROMPT = [5, 17, 123, 44, 17, 5, 200, 81]
NUM_TOKENS = 24
FIRST_VISIBLE = len(SPECIAL_TOKENS)  # "!" and the 93 characters after it are tokens of their own
SPACE = FIRST_VISIBLE + list(byte_characters()).index(ord(" "))
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}


class AnswerPenalties:
    """OpenAI's presence and frequency penalties, which transformers has not."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for token, count in Counter(ids[0, len(PROMPT) :].tolist()).items():
            scores[0, token] -= self._presence + self._frequency * count
        return scores


def reference(processors: list[Any], stop_ids: tuple[int, ...] = ()) -> list[int]:
    model, ids = build_tiny(), list(PROMPT)
    with one_thread(), torch.inference_mode():
        while len(ids) < len(PROMPT) + NUM_TOKENS and not (len(ids) > len(PROMPT) and ids[-1] in stop_ids):
            scores = model(torch.tensor([ids])).logits[:, -1]
            ids.append(int(LogitsProcessorList(processors)(torch.tensor([ids]), scores).argmax()))
    return ids[len(PROMPT) :]


@pytest.fixture(scope="module")
def expected() -> list[tuple[dict[str, Any], list[int]]]:
    """Eight requests and their ids."""
    plain = reference([])
    ends = (plain[1], plain[3])
    bias = {str(plain[0]): -60, "222": 3.5}
    biased = SequenceBiasLogitsProcessor([[[int(token)], float(value)] for token, value in bias.items()])
    token = next(token for token in plain if FIRST_VISIBLE <= token < FIRST_VISIBLE + 94)
    word = chr(ord("!") + token - FIRST_VISIBLE)
    words = [[token], [SPACE, token]]
    return [
        ({}, plain),
        ({"repetition_penalty": 5.0}, reference([RepetitionPenaltyLogitsProcessor(5.0)])),
        ({"presence_penalty": 50.0}, reference([AnswerPenalties(50.0, 0.0)])),
        ({"frequency_penalty": 1.5}, reference([AnswerPenalties(0.0, 1.5)])),
        ({"sampling_parameters": json.dumps({"logit_bias": bias})}, reference([biased])),
        ({"bad_words": [word.encode()]}, reference([NoBadWordsLogitsProcessor(words, [299])])),
        (
            {"sampling_parameters": json.dumps({"stop_token_ids": ends}), "min_tokens": 9},
            reference([MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, list(ends))], ends),
        ),
        ({"temperature": 3.0, "min_p": 1.0, "seed": 4}, plain),
    ]


def ask(server: LiveServer, settings: dict[str, Any], *, stream: bool) -> list[Response]:
    with wire(server.target, "tiny") as client:
        responses = client.ask(input_ids=PROMPT, stream=stream, return_output_ids=True, **GREEDY | settings)
    assert not [response.error for response in responses if response.error]
    return responses


@pytest.mark.parametrize("stream", [True, False])
def test_options_alone(tiny: LiveServer, expected: list[tuple[dict[str, Any], list[int]]], stream: bool) -> None:
    assert sum(ids != expected[0][1] for _, ids in expected) == 6, "an option that changes nothing proves nothing"
    for settings, ids in expected:
        assert ids_of(ask(tiny, settings, stream=stream)) == ids, settings


@pytest.mark.parametrize("stream", [True, False])
def test_eight_options_at_once(
    tiny: LiveServer, expected: list[tuple[dict[str, Any], list[int]]], stream: bool
) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda case: ids_of(ask(tiny, case[0], stream=stream)), expected))
    assert answers == [ids for _, ids in expected]


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_of_prompt_and_answer(tiny: LiveServer, stream: bool) -> None:
    asked = {"sampling_parameters": json.dumps({"logprobs": 5, "prompt_logprobs": 1, "top_k": 1})}
    for _ in range(2):
        responses = ask(tiny, asked | {"return_log_probs": True, "return_cumulative_logprob": True}, stream=stream)
        ids = ids_of(responses)
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
