"""The ids-equal rule lets a tie pass and nothing else."""

import pytest

from tests.aids.ids_equal import NearTieWarning, Reference, assert_ids_equal

PROMPT = [100]
REFERENCE = Reference(ids=[1, 2, 3, 4], runner_ups=[11, 12, 13, 14], gaps=[5.0, 1e-5, 5.0, 1e-5])


def check(ids: list[int], continuations: dict[int, list[int]] | None = None) -> None:
    """Compare with REFERENCE; `continuations` gives the engine's ids by the length of the forced prompt."""

    def generate(prompt: list[int], num_tokens: int) -> list[int]:
        assert prompt == PROMPT + REFERENCE.ids[: len(prompt) - 1]
        ids = (continuations or {})[len(prompt)]
        assert len(ids) == num_tokens
        return ids

    assert_ids_equal(ids, REFERENCE, prompt=PROMPT, generate=generate, name="case")


def test_equal_ids_pass_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    check([1, 2, 3, 4])
    assert not recwarn.list


def test_a_wide_gap_is_a_failure() -> None:
    with pytest.raises(AssertionError, match=r"case: id 0 is 11, the reference has 1, ahead of 11 by 5 in logits"):
        check([11, 2, 3, 4])


def test_a_tie_with_another_id_than_the_runner_up_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="in a tie with 12 only"):
        check([1, 77, 3, 4])


def test_a_tie_is_reported_and_the_rest_checked_under_the_references_ids() -> None:
    with pytest.warns(NearTieWarning, match="id 1 is 12"):
        check([1, 12, 50, 51], {3: [3, 4]})


def test_a_difference_after_a_tie_is_a_failure() -> None:
    with pytest.warns(NearTieWarning), pytest.raises(AssertionError, match="id 2 is 9"):
        check([1, 12, 50, 51], {3: [9, 4]})


def test_a_second_tie_at_the_end_passes() -> None:
    with pytest.warns(NearTieWarning) as ties:
        check([1, 12, 50, 51], {3: [3, 14]})
    assert len(ties) == 2


def test_another_number_of_ids_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="3 ids, the reference has 4"):
        check([1, 2, 3])
