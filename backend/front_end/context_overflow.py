"""context_overflow=drop_oldest_turns: which part of a conversation goes when it no longer fits.

Dropped are whole exchanges, from a user's message to the model's answer, the oldest first; system messages that open
the conversation stay. An exchange lies anywhere: a turn of the session, or part of a transcript that was sent as one
turn. A raw turn, and what came before it, is never dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import msgspec

from limpet.backend.chat_template import Message
from limpet.backend.front_end.conversation import TurnPrompt
from limpet.backend.link.messages import TurnBegun, TurnView

ERROR, DROP_OLDEST_TURNS = "error", "drop_oldest_turns"
_SPARE_SHARE = 4  # dropping makes room for an answer of a quarter of the context, so that not every turn drops one


@dataclass(frozen=True)
class Shortened:
    """A conversation of which the first `num_exchanges` exchanges are gone.

    Of the session's turns the first `num_turns` are gone; `first_messages` (JSON) is what is left of the messages of
    the one after them, None if that is whole or none is left.
    """

    begun: TurnBegun
    messages: Sequence[Message]
    num_exchanges: int = 0
    num_turns: int = 0
    first_messages: str | None = None


def fitting_prompt(
    whole: Shortened, build: Callable[[Shortened], TurnPrompt], session_len: int, max_tokens: int | None
) -> tuple[Shortened, TurnPrompt]:
    """The conversation without as many of its oldest exchanges as must go, and its prompt.

    It is whole if it leaves room for `max_tokens`, or for a quarter of the context if that is less; else so many go
    that a quarter of the context is free. The last exchange stays even if it does not fit.
    """
    prompt = build(whole)
    spare = session_len // _SPARE_SHARE
    if len(prompt.ids) + min(spare, max_tokens or spare) <= session_len:
        return whole, prompt
    choices = _shortened(whole.begun, whole.messages)
    low, high = 0, len(choices) - 1  # the first choice that fits, else the last
    while low < high:
        middle = (low + high) // 2
        if len(build(choices[middle]).ids) + spare <= session_len:
            high = middle
        else:
            low = middle + 1
    return (choices[low], build(choices[low])) if choices else (whole, prompt)


def _shortened(begun: TurnBegun, messages: Sequence[Message]) -> list[Shortened]:
    """The conversation without its first exchange, without the first two, and so on."""
    parts: list[Sequence[Message]] = [*(msgspec.json.decode(view.messages) for view in begun.turns), messages]
    system = [] if begun.head else list(takewhile(lambda message: message["role"] == "system", parts[0]))
    places = [(part, index) for part, each in enumerate(parts) for index in range(len(each))]
    starts = [(part, index) for part, index in places if parts[part][index]["role"] == "user"]
    return [
        _from(begun, parts, system, part, index, num_exchanges)
        for num_exchanges, (part, index) in enumerate(starts[1:], start=1)
    ]


def _from(
    begun: TurnBegun, parts: list[Sequence[Message]], system: list[Message], part: int, index: int, num_exchanges: int
) -> Shortened:
    """What begins with message `index` of `part`; the last part is the new turn."""
    opening = [*system, *parts[part][index:]]
    if part == len(begun.turns):
        return Shortened(_with_turns(begun, []), opening, num_exchanges, part)
    first_messages = msgspec.json.encode(opening).decode()
    first = TurnView(first_messages, begun.turns[part].reply)
    left = _with_turns(begun, [first, *begun.turns[part + 1 :]])
    return Shortened(left, parts[-1], num_exchanges, part, first_messages)


def _with_turns(begun: TurnBegun, turns: list[TurnView]) -> TurnBegun:
    return TurnBegun(begun.key, begun.history_len, begun.head, turns)
