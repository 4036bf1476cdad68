"""Requests from a file of ShareGPT's form, chosen as the field's serving benchmarks do."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from limpet.benchmarks.workload import SEED, Request

MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOKENS = 4, 1024, 2048


class WorkloadError(Exception):
    """The requests cannot be made; the text says why."""


def sharegpt_file(path: Path, num_requests: int, tokenize: Callable[[str], list[int]]) -> list[Request]:
    """Prompt and answer's length from the first two turns of conversations, in a seeded order.

    Left out are those with less than 4 tokens in either, more than 1024 in the prompt or more than 2048 in both.
    """
    pairs = _pairs(path)
    order = np.random.Generator(np.random.PCG64(SEED)).permutation(len(pairs))
    found = list(itertools.islice(_fitting((pairs[index] for index in order), tokenize), num_requests))
    if len(found) < num_requests:
        raise WorkloadError(f"{path} has {len(found)} conversations of a fitting length; {num_requests} are wanted.")
    return found


def _pairs(path: Path) -> list[tuple[str, str]]:
    try:
        conversations = [each["conversations"] for each in json.loads(path.read_text("utf-8"))]
        return [(first["value"], second["value"]) for first, second, *_ in (c for c in conversations if len(c) > 1)]
    except (OSError, ValueError, TypeError, KeyError) as error:
        shape = '[{"conversations": [{"value": prompt}, {"value": answer}]}]'
        raise WorkloadError(f"{path} is no file of the form {shape}: {error!r}.") from None


def _fitting(pairs: Iterator[tuple[str, str]], tokenize: Callable[[str], list[int]]) -> Iterator[Request]:
    for prompt, answer in pairs:
        ids, num_output = tokenize(prompt), len(tokenize(answer))
        is_long = len(ids) > MAX_PROMPT_TOKENS or len(ids) + num_output > MAX_TOKENS
        if min(len(ids), num_output) >= MIN_TOKENS and not is_long:
            yield Request(ids, num_output)
