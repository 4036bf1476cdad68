"""The prompt of a turn: the chat template over the whole conversation, the model's own ids in the assistant's places.

Tokenising an earlier answer's text again need not give the ids that the model produced, and the cache holds those. So
the template renders each earlier reply between two marks (private-use characters that nobody can guess). Where both
marks come out with the reply unchanged between them, its ids are spliced in, and the text between two replies is
tokenised by itself. A reply that the template changes (Qwen3 drops earlier thinking) is ordinary text of the prompt.
The space that some templates (Llama 2, DeepSeek-V2) write between the generation prompt and a reply is left out: the
model's ids begin with it.
"""

import re
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from limpet.backend.chat_template import ChatTemplate, Message, TemplateError, Tool
from limpet.backend.link.messages import TurnBegun, unpack_ids
from limpet.backend.tokenizer import Tokenizer

_FIRST_INDEX = 0xF0000  # of the supplementary private-use area: one character numbers a mark
_PLACEHOLDER = "."  # content of a message whose place alone is wanted


@dataclass(frozen=True)
class TurnPrompt:
    """`turn_ends[i]` is where the i-th earlier turn ends inside `ids`; a raw turn needs none."""

    ids: list[int]
    turn_ends: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Reply:
    """An assistant's message of which the ids are known."""

    index: int
    ids: list[int]
    text: str


@dataclass(frozen=True)
class _Text:
    """Rendered text between two spliced replies; `reply_ends` are positions of replies that the template changed."""

    text: str
    reply_ends: dict[int, int]


class Conversation:
    """Turns messages and a session's history into prompt ids; one per model, safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._base = "".join(chr(0xE000 + secrets.randbelow(6400)) for _ in range(10))
        self._mark = re.compile(f"{self._base}(.)")

    @property
    def has_template(self) -> bool:
        return self._template is not None

    @cached_property
    def _gap(self) -> str:
        """White space that the template writes before an earlier reply, but not at the end of a generation prompt."""
        reply = _Reply(0, [], _PLACEHOLDER)
        try:
            generation_prompt = self._render([_user(_PLACEHOLDER)])
            before_reply = self._render([_user(_PLACEHOLDER), self._assistant(reply, {0})]).split(self._base)[0]
        except TemplateError:
            return ""  # a template that wants more than a user's message
        gap = before_reply.removeprefix(generation_prompt)
        return gap if gap.isspace() else ""

    def turn(self, begun: TurnBegun, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> TurnPrompt:
        """Ids of a session's next templated turn, or of a conversation of its own; raises TemplateError."""
        head = unpack_ids(begun.head)
        replies = [_Reply(0, head, _PLACEHOLDER)] if head else []
        conversation: list[Message | _Reply] = [_user(_PLACEHOLDER), *replies] if head else []
        for view in begun.turns:
            ids = unpack_ids(view.reply)
            replies.append(_Reply(len(replies), ids, self._tokenizer.decode(ids)))
            conversation += [*msgspec.json.decode(view.messages), replies[-1]]
        pieces = self._pieces([*conversation, *messages], replies, tools)
        return self._assemble(self._after_head(pieces, head), len(replies) - bool(head), head)

    def raw_turn(self, begun: TurnBegun, text: str | None, ids: list[int]) -> TurnPrompt:
        """Ids of a session whose next turn appends `text`, or `ids` where that is None, as it is."""
        history = self._history(begun)
        if text is None:
            return TurnPrompt([*history, *ids])
        encode = self._tokenizer.encode_segment if history else self._tokenizer.encode_prompt
        return TurnPrompt([*history, *encode(text)])

    def _history(self, begun: TurnBegun) -> list[int]:
        """The session's own ids: the last turn's prompt as it was built then, and its reply."""
        if not begun.turns:
            return unpack_ids(begun.head)
        last = begun.turns[-1]
        earlier = TurnBegun(begun.key, history_len=0, head=begun.head, turns=begun.turns[:-1])
        return [*self.turn(earlier, msgspec.json.decode(last.messages)).ids, *unpack_ids(last.reply)]

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        if self._template is None:
            raise TemplateError("The model has no chat template: send text or ids, no messages.")
        return self._template.render(messages, tools)

    def _pieces(
        self, conversation: Sequence[Message | _Reply], replies: list[_Reply], tools: Sequence[Tool]
    ) -> list[_Text | _Reply]:
        """The rendered conversation as text and intact replies."""
        marked = self._render_marked(conversation, set(range(len(replies))), tools)
        intact = self._intact(marked, replies)
        if len(intact) == len(replies):
            return self._split(marked, replies, intact)
        # What the template does to a reply may depend on the marks around it: the others are rendered without.
        plain = self._render_marked(conversation, intact, tools)
        if self._drop_marks(marked, intact) == plain:
            return self._split(marked, replies, intact)
        if self._intact(plain, replies) == intact:
            return self._split(plain, replies, intact)
        return self._split(self._render_marked(conversation, set(), tools), replies, set())

    def _render_marked(self, conversation: Sequence[Message | _Reply], marked: set[int], tools: Sequence[Tool]) -> str:
        messages = [self._assistant(m, marked) if isinstance(m, _Reply) else m for m in conversation]
        return self._render(messages, tools)

    def _assistant(self, reply: _Reply, marked: set[int]) -> Message:
        content = self._marked(reply) if reply.index in marked else reply.text
        return {"role": "assistant", "content": content}

    def _marked(self, reply: _Reply) -> str:
        opening, closing = (self._base + chr(_FIRST_INDEX + 2 * reply.index + side) for side in (0, 1))
        return opening + reply.text + closing

    def _intact(self, rendered: str, replies: list[_Reply]) -> set[int]:
        """Indices of the replies that came out once and unchanged."""
        times = Counter(mark[1] for mark in self._mark.finditer(rendered))
        intact = set()
        for mark in self._mark.finditer(rendered):
            index, side = divmod(ord(mark[1]) - _FIRST_INDEX, 2)
            is_only = times[mark[1]] == times[chr(_FIRST_INDEX + 2 * index + 1)] == 1
            if side == 0 and is_only and rendered.startswith(self._marked(replies[index]), mark.start()):
                intact.add(index)
        return intact

    def _drop_marks(self, rendered: str, kept: set[int]) -> str:
        return self._mark.sub(lambda m: m[0] if (ord(m[1]) - _FIRST_INDEX) // 2 in kept else "", rendered)

    def _split(self, rendered: str, replies: list[_Reply], intact: set[int]) -> list[_Text | _Reply]:
        pieces: list[_Text | _Reply] = []
        reply_ends: dict[int, int] = {}
        text, position = "", 0
        for mark in self._mark.finditer(rendered):
            index, is_closing = divmod(ord(mark[1]) - _FIRST_INDEX, 2)
            if index in intact and is_closing:
                pieces += [_Text(text.removesuffix(self._gap), reply_ends), replies[index]]
                text, reply_ends = "", {}
            else:
                text += rendered[position : mark.start()]
                if is_closing:
                    reply_ends[index] = len(text)
            position = mark.end()
        return [*pieces, _Text(text + rendered[position:], reply_ends)]

    def _after_head(self, pieces: list[_Text | _Reply], head: list[int]) -> list[_Text | _Reply]:
        """The pieces from the head's reply on; all of them if there is no head."""
        if not head:
            return pieces
        for position, piece in enumerate(pieces):
            if isinstance(piece, _Reply) and piece.index == 0:
                return pieces[position:]
        raise TemplateError("The model's chat template cannot continue a raw turn: it changes the assistant's text.")

    def _assemble(self, pieces: list[_Text | _Reply], num_turns: int, head: list[int]) -> TurnPrompt:
        ids: list[int] = []
        ends: dict[int, int] = {}
        before: _Reply | None = None
        for piece in pieces:
            if isinstance(piece, _Reply):
                before = piece
                ids += piece.ids
                ends[piece.index] = len(ids)
                continue
            skipped = self._end_of_turn_chars(before, piece.text)
            text = piece.text[skipped:]
            segment = self._tokenizer.encode_segment(text)
            ids += segment if before else self._tokenizer.with_bos(segment)
            for index, position in piece.reply_ends.items():
                ends[index] = len(ids) - len(segment) + self._tokenizer.tokens_before(text, position - skipped)
        return TurnPrompt(ids, _turn_ends(ends, range(bool(head), num_turns + bool(head)), len(head)))

    def _end_of_turn_chars(self, reply: _Reply | None, text: str) -> int:
        """How many characters write the end mark that the model has already produced itself."""
        if reply is None or not reply.ids or reply.ids[-1] not in self._tokenizer.special_ids:
            return 0
        end_mark = self._tokenizer.token_text(reply.ids[-1]) or ""
        stripped = text.lstrip()
        return len(text) - len(stripped) + len(end_mark) if stripped.startswith(end_mark) else 0


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _turn_ends(ends: dict[int, int], indices: range, start: int) -> list[int]:
    """Each turn's end; one that cannot be found in what the template made of it ends where the turn before did."""
    turn_ends: list[int] = []
    for index in indices:
        turn_ends.append(ends.get(index, turn_ends[-1] if turn_ends else start))
    return turn_ends
