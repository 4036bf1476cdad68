"""Streams of tokens as text, against the tokenizers library's decode of the whole."""

from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from limpet.backend.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    DetokenizerFactory,
    SentencePieceDetokenizer,
    WindowDetokenizer,
)
from limpet.backend.tokenizer import Tokenizer
from tests.front_end.sample_tokenizers import CORPUS, byte_level, metaspace, sentencepiece

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
IDS = st.lists(st.integers(0, 10_000), max_size=40)
KINDS: dict[str, tuple[Callable[[], Tokenizer], type[Detokenizer]]] = {
    "byte level": (byte_level, ByteLevelDetokenizer),
    "sentencepiece": (sentencepiece, SentencePieceDetokenizer),
    "sentencepiece without strip": (lambda: sentencepiece(strips=False), SentencePieceDetokenizer),
    "metaspace": (metaspace, WindowDetokenizer),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def make(kind: str) -> tuple[Tokenizer, Detokenizer]:
    tokenizer = KINDS[kind][0]()
    return tokenizer, DetokenizerFactory(tokenizer)()


def stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.feed([token_id]) for token_id in ids), detokenizer.flush()]


@EVERY_KIND
def test_each_kind_of_decoder_has_its_detokenizer(kind: str) -> None:
    assert type(make(kind)[1]) is KINDS[kind][1]


@EVERY_KIND
@pytest.mark.parametrize("text", [*CORPUS, " leading space", "a" + "\N{GRINNING FACE}" * 3 + "b"])
def test_text_arrives_exactly_and_without_half_characters(kind: str, text: str) -> None:
    tokenizer, detokenizer = make(kind)
    ids = tokenizer.encode_segment(text)
    deltas = stream(detokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)
    assert not any(REPLACEMENT in delta for delta in deltas)


@EVERY_KIND
@pytest.mark.parametrize("text", [*CORPUS, "a" + "\N{GRINNING FACE}" * 3 + "b"])
def test_bytes_of_single_tokens_are_those_of_the_text(kind: str, text: str) -> None:
    """Guided decoding works on them; at the very start a decoder may drop a space."""
    tokenizer, _ = make(kind)
    token_bytes = DetokenizerFactory(tokenizer).token_bytes
    ids = tokenizer.encode_segment(text)
    joined = b"".join(token_bytes(token_id) for token_id in ids).decode()
    assert joined.removeprefix(" ") == tokenizer.decode(ids).removeprefix(" ")
    assert not any(token_bytes(token_id) for token_id in (*tokenizer.special_ids, tokenizer.vocab_size + 5))


@pytest.mark.parametrize("kind", ["byte level", "metaspace"])
@given(ids=IDS)
def test_any_ids_read_as_the_library_decodes_them(kind: str, ids: list[int]) -> None:
    tokenizer, detokenizer = make(kind)
    ids = [token_id % (tokenizer.vocab_size + 20) for token_id in ids]  # past the vocabulary: padding rows
    assert "".join(stream(detokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece without strip"])
@given(ids=IDS)
def test_sentencepiece_ids_read_as_the_library_decodes_them(kind: str, ids: list[int]) -> None:
    tokenizer, detokenizer = make(kind)
    ids = [token_id % (tokenizer.vocab_size + 20) for token_id in ids]
    expected = tokenizer.decode(ids)
    # A broken run of bytes is all U+FFFD there, also the valid characters that a stream has shown by then.
    assume(REPLACEMENT not in expected)
    assert "".join(stream(detokenizer, ids)) == expected


def test_a_broken_run_of_byte_tokens_is_replaced_byte_by_byte() -> None:
    tokenizer, detokenizer = make("sentencepiece")
    ids = [tokenizer.backend.token_to_id(token) for token in ("a", "<0xE4>", "<0xBD>", "▁cat")]
    assert "".join(stream(detokenizer, ids)) == tokenizer.decode(ids) == f"a{REPLACEMENT * 2} cat"


@EVERY_KIND
@given(data=st.data())
def test_the_tokens_covering_a_text_are_the_fewest_that_decode_to_it(kind: str, data: st.DataObject) -> None:
    tokenizer, detokenizer = make(kind)
    ids = tokenizer.encode_segment(data.draw(st.sampled_from(CORPUS)))
    text = "".join(stream(detokenizer, ids))
    num_chars = data.draw(st.integers(0, len(text)))
    kept = detokenizer.tokens_covering(num_chars)
    assert tokenizer.decode(ids[:kept]).startswith(text[:num_chars])
    if kept:
        assert not tokenizer.decode(ids[: kept - 1]).startswith(text[:num_chars])


@EVERY_KIND
@given(data=st.data())
def test_tokens_within_a_text_are_those_it_shows_completely(kind: str, data: st.DataObject) -> None:
    tokenizer, detokenizer = make(kind)
    ids = tokenizer.encode_segment(data.draw(st.sampled_from(CORPUS)))
    text = "".join(stream(detokenizer, ids))
    shown = text[: data.draw(st.integers(0, len(text)))]
    delivered = detokenizer.tokens_within(len(shown))
    assert shown.startswith(tokenizer.decode(ids[:delivered]).rstrip(REPLACEMENT))
    if delivered < len(ids):
        assert len(tokenizer.decode(ids[: delivered + 1])) > len(shown)


def test_a_token_that_ends_inside_a_character_is_delivered_with_the_character() -> None:
    tokenizer, detokenizer = make("byte level")
    first, *rest = [tokenizer.backend.token_to_id(char) for char in "ðŁĺĦ"]  # the bytes F0 9F 98 84
    assert detokenizer.feed([first]) == ""
    assert detokenizer.tokens_within(0) == 0
    assert detokenizer.feed(rest) == "😄"
    assert detokenizer.tokens_within(1) == 4
    assert detokenizer.tokens_covering(1) == 4


@EVERY_KIND
def test_special_tokens_are_not_shown(kind: str) -> None:
    tokenizer, detokenizer = make(kind)
    special = tokenizer.backend.token_to_id("<|end|>")
    ids = tokenizer.encode_segment("The cat")
    assert "".join(stream(detokenizer, [special, *ids, special, special])) == tokenizer.decode(ids)
