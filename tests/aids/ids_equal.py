"""When generated ids count as equal to a reference: the rule of this project's parity tests.

Equal, or at the first difference the reference's two best logits lie less than MAX_TIE_GAP apart and the other id is
the reference's runner-up. Such a tie is counted and reported as a NearTieWarning (pytest prints them at the end), and
the rest is checked with the reference's id forced in its place.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

MAX_TIE_GAP = 1e-4

Generate: TypeAlias = Callable[[list[int], int], list[int]]


class NearTieWarning(UserWarning):
    """Ids differ from the reference at a place where its two best logits are as good as equal."""


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """Greedy ids after a prompt, with the reference's second choice and its distance in logits at each place."""

    ids: list[int]
    runner_ups: list[int]
    gaps: list[float]

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.runner_ups) == len(self.gaps):
            raise ValueError("ids, runner_ups and gaps must be of one length.")


def assert_ids_equal(
    ids: Sequence[int], reference: Reference, *, prompt: list[int], generate: Generate, name: str
) -> None:
    """Check `ids` against the reference by the rule above.

    `generate(prompt, num_tokens)` gives greedy ids of the engine under test: called only after a tie, with the
    reference's own ids appended to the prompt. Raises AssertionError that says where and by how much they differ.
    """
    assert len(ids) == len(reference.ids), f"{name}: {len(ids)} ids, the reference has {len(reference.ids)}."
    start = 0
    while (place := _first_difference(ids, reference.ids[start:])) is not None:
        _require_tie(ids[place], reference, start + place, name)
        start += place + 1
        if start == len(reference.ids):
            return
        ids = generate(prompt + reference.ids[:start], len(reference.ids) - start)
        assert len(ids) == len(reference.ids) - start, f"{name}: {len(ids)} ids after the tie at {start - 1}."


def _first_difference(ids: Sequence[int], expected: Sequence[int]) -> int | None:
    return next((place for place, (one, other) in enumerate(zip(ids, expected, strict=True)) if one != other), None)


def _require_tie(found: int, reference: Reference, place: int, name: str) -> None:
    gap, runner_up = reference.gaps[place], reference.runner_ups[place]
    where = f"{name}: id {place} is {found}, the reference has {reference.ids[place]}"
    assert gap < MAX_TIE_GAP, f"{where}, ahead of {runner_up} by {gap:.3g} in logits (a tie is < {MAX_TIE_GAP})."
    assert found == runner_up, f"{where} in a tie with {runner_up} only."
    warnings.warn(f"{where}, a tie within {gap:.3g} in logits.", NearTieWarning, stacklevel=3)
