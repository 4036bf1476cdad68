"""Which exchanges a conversation loses when it no longer fits; here a character is a token."""

import json

import pytest

from limpet.backend.chat_template import Message
from limpet.backend.front_end.context_overflow import Shortened, fitting_prompt
from limpet.backend.front_end.conversation import TurnPrompt
from limpet.backend.link.messages import TurnBegun, TurnView, pack_ids, unpack_ids

REPLY = [ord("r")] * 7


def messages(text: str) -> list[Message]:
    """`s:… u:… a:…` as a list of messages."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[part[0]], "content": part} for part in text.split()]


def conversation(*turns: str, new: str, head: str = "") -> Shortened:
    views = [TurnView(json.dumps(messages(turn)), pack_ids(REPLY)) for turn in turns]
    return Shortened(TurnBegun(1, 0, pack_ids([ord(character) for character in head]), views), messages(new))


def written(shortened: Shortened) -> str:
    """The whole conversation as text."""
    parts = [message["content"] for message in shortened.messages]
    earlier: list[str] = []
    for view in shortened.begun.turns:
        earlier += [message["content"] for message in json.loads(view.messages)]
        earlier.append("".join(map(chr, unpack_ids(view.reply))))
    return " ".join(["".join(map(chr, unpack_ids(shortened.begun.head))), *earlier, *parts]).strip()


def fit(whole: Shortened, session_len: int, max_tokens: int | None = None) -> Shortened:
    def build(shortened: Shortened) -> TurnPrompt:
        return TurnPrompt([ord(character) for character in written(shortened)])

    shortened, prompt = fitting_prompt(whole, build, session_len, max_tokens)
    assert prompt == build(shortened)
    return shortened


def test_a_conversation_that_fits_is_left_alone() -> None:
    whole = conversation("s:S u:1", "u:2", new="u:3")
    assert fit(whole, len(written(whole)) + 2, max_tokens=2) is whole
    assert fit(whole, -(-len(written(whole)) * 4 // 3)) is whole


@pytest.mark.parametrize(
    ("session_len", "left", "num_turns"),
    [
        (35, "s:S u:2 rrrrrrr u:3", 1),
        (30, "s:S u:2 rrrrrrr u:3", 1),
        (24, "s:S u:3", 2),
        (4, "s:S u:3", 2),
    ],
)
def test_the_oldest_turns_go_until_a_quarter_of_the_context_is_free(
    session_len: int, left: str, num_turns: int
) -> None:
    shortened = fit(conversation("s:S u:1", "u:2", new="u:3"), session_len)
    assert written(shortened) == left
    assert (shortened.num_exchanges, shortened.num_turns) == (num_turns, num_turns)


def test_exchanges_inside_one_turn_go_one_by_one() -> None:
    replayed = conversation("s:S u:1 a:1 u:2 a:2 u:3", new="u:4")
    shortened = fit(replayed, 38)
    assert written(shortened) == "s:S u:2 a:2 u:3 rrrrrrr u:4"
    assert (shortened.num_exchanges, shortened.num_turns) == (1, 0)
    assert json.loads(shortened.first_messages or "") == messages("s:S u:2 a:2 u:3")


def test_a_transcript_of_its_own_is_shortened_too() -> None:
    shortened = fit(conversation(new="s:S s:T u:1 a:1 u:2"), 20)
    assert (written(shortened), shortened.num_exchanges) == ("s:S s:T u:2", 1)


def test_a_tools_result_goes_with_its_question() -> None:
    shortened = fit(conversation("u:1", "t:x", "u:2", new="t:y"), 30)
    assert (written(shortened), shortened.num_exchanges, shortened.num_turns) == ("u:2 rrrrrrr t:y", 1, 2)


def test_a_raw_turn_stays() -> None:
    shortened = fit(conversation("u:1", "u:2", new="u:3", head="raw"), 24)
    assert (written(shortened), shortened.num_turns) == ("raw u:3", 2)
