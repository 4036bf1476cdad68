"""The measured requests are the same everywhere: their digests are those of the results published for peers."""

import pytest

from limpet.benchmarks.workload import digest, sharegpt, totals, uniform


@pytest.mark.parametrize(("vocab_size", "expected"), [(100_000, "76e3f70e0487"), (32_000, "b8cee58839de")])
def test_sharegpt_has_the_published_digest(vocab_size: int, expected: str) -> None:
    requests = sharegpt(vocab_size)
    assert digest(requests) == expected
    assert totals(requests) == (236_000, 215_000)


@pytest.mark.parametrize(
    ("num_requests", "prompt_tokens", "output_tokens", "expected"),
    [(1, 128, 256, "bdd69b680114"), (256, 128, 256, "e9540473da30"), (16, 2048, 1, "f1de0233a841")],
)
def test_uniform_has_the_published_digest(
    num_requests: int, prompt_tokens: int, output_tokens: int, expected: str
) -> None:
    assert digest(uniform(32_000, num_requests, prompt_tokens, output_tokens)) == expected


def test_a_repeat_has_other_ids_of_the_same_shape() -> None:
    first, second = (uniform(32_000, 2, 8, 4, repeat) for repeat in (0, 1))
    assert totals(first) == totals(second) == (16, 8)
    assert first != second


def test_totals_that_no_lengths_reach_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot sum to 5"):
        sharegpt(32_000, num_requests=2, input_tokens=5)
