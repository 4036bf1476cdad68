"""Stop strings against a search over the whole text, whatever the borders between the pieces."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from limpet.backend.front_end.stop_strings import StopScanner, StopStrings

ALPHABET = st.sampled_from("ab⭐")
TEXT = st.text(ALPHABET, max_size=30)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4)


def cut_by_search(text: str, stops: list[str]) -> int | None:
    """Where the stop string begins that is complete first; of two that end together, the longer one."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return end - max(lengths)
    return None


def may_become_stop(text: str, stops: list[str]) -> int:
    """Length of the longest end of the text that begins a stop string."""
    beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
    return max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)


def pieces_of(text: str, borders: list[int]) -> list[str]:
    cuts = [0, *sorted(border % (len(text) + 1) for border in borders), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(cuts)]


@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=8))
def test_pieces_give_the_cut_of_a_search_over_the_whole_text(text: str, stops: list[str], borders: list[int]) -> None:
    scanner = StopScanner(StopStrings(stops))
    shown = ""
    for piece in pieces_of(text, borders):
        shown += scanner.feed(piece)
        if scanner.found:
            break
    cut = cut_by_search(text, stops)
    assert scanner.found == (cut is not None)
    assert shown + scanner.flush() == text[:cut]


@given(TEXT, STOPS)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    scanner = StopScanner(StopStrings(stops))
    shown = ""
    for end, char in enumerate(text, 1):
        shown += scanner.feed(char)
        if scanner.found:
            return
        assert shown == text[: end - may_become_stop(text[:end], stops)]


def test_a_stop_string_inside_a_word_cuts_the_word() -> None:
    scanner = StopScanner(StopStrings(["orl"]))
    assert [scanner.feed(piece) for piece in ("Hello w", "or", "ld")] == ["Hello w", "", ""]
    assert scanner.found
    assert scanner.flush() == ""


def test_without_stop_strings_all_text_is_shown_at_once() -> None:
    scanner = StopScanner(StopStrings([]))
    assert scanner.feed("anything") == "anything"
    assert not scanner.found
