"""What the controls make of what a person, or a page hardly loaded, has in them."""

from typing import Any

import pytest

from limpet.webui.controls import Controls, choices_from

EMPTY: dict[str, Any] = Controls.read((None,) * 9)


def test_a_page_hardly_loaded_asks_with_the_models_own_settings() -> None:
    choices = choices_from(EMPTY)
    assert (choices.model, choices.system, choices.options) == ("", "", {"max_tokens": None, "seed": None})


@pytest.mark.parametrize(
    ("name", "typed", "used"),
    [
        ("max_tokens", None, 0), ("max_tokens", 20000, 8192), ("max_tokens", -5, 0), ("max_tokens", 3.7, 3),
        ("temperature", None, 0.0), ("temperature", 9, 2.0), ("temperature", 0.3, 0.3),
        ("top_p", 0, 0.05), ("top_p", 7, 1.0), ("top_k", None, 0), ("top_k", 1e9, 200), ("repetition_penalty", 0, 0.8),
    ],
)  # fmt: skip
def test_a_number_out_of_its_range_counts_as_the_nearest_in_it(name: str, typed: float | None, used: float) -> None:
    values = [typed if each == name else value for each, value in EMPTY.items()]
    assert Controls.read(tuple(values))[name] == used


@pytest.mark.parametrize("text", ["x", "²", "٣", "-1", "1.5", "7" * 5000, str(2**64)])
def test_a_seed_that_is_none_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match=r"^The seed must be a whole number from 0 to 2\^64 - 1, or empty"):
        choices_from({**EMPTY, "seed": text})


@pytest.mark.parametrize(("text", "seed"), [("", None), (" 7 ", 7), (str(2**64 - 1), 2**64 - 1)])
def test_a_seed_is_taken_as_written(text: str, seed: int | None) -> None:
    assert choices_from({**EMPTY, "seed": text}).options["seed"] == seed


def test_the_chosen_model_stays_until_the_server_has_said_that_it_has_others() -> None:
    assert Controls.model_update("two", ())["value"] == "two"
    assert Controls.model_update("two", ("one", "two"))["value"] == "two"
    assert Controls.model_update("two", ("one", "three"))["value"] == "one"
    assert Controls.model_update("", ())["value"] is None
