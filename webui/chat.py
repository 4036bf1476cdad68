"""One conversation in one tab: its record, its session on the server, and the answer on its way."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from limpet.client import AsyncClient, AsyncSession, LimpetError, Options, SessionState
from limpet.client.wire import new_id
from limpet.webui.answer import Answer
from limpet.webui.library import Record


@dataclass(frozen=True)
class Choices:
    """What a person has set for the next answer."""

    model: str
    system: str = ""
    options: Options = field(default_factory=Options)


@dataclass(frozen=True)
class ShownTurn:
    """A question with what there is of its answer; `note` is the line under it."""

    question: str
    answer: str
    note: str = ""


class Chat:
    """A record with a session, made when the first question is asked."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.session: AsyncSession | None = None
        self.answer: Answer | None = None
        self.ended: Answer | None = None  # the last one, until the page has shown how it ended
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def is_running(self) -> bool:
        return self.answer is not None

    @property
    def state(self) -> SessionState:
        return self.record.state if self.session is None else self.session.state

    def turns(self) -> list[ShownTurn]:
        """All turns, and the question that has no answer yet."""
        state, notes = self.state, self.record.notes
        bounds = [*state["turns"], len(state["transcript"])]
        turns = []
        for number, (start, end) in enumerate(pairwise(bounds)):
            *question, answer = (str(message["content"]) for message in state["transcript"][start:end])
            note = notes[number] if number < len(notes) else ""
            turns.append(ShownTurn("\n\n".join(question), answer, note))
        if self.answer is not None and len(turns) == len(notes):
            turns.append(ShownTurn(self.answer.question, ""))
        return turns

    def ask(
        self,
        client: AsyncClient,
        choices: Choices,
        question: str,
        at_turn: int | None = None,
        keep: Callable[[Record], None] = lambda record: None,
    ) -> Answer:
        """Begin the answer to `question`; with `at_turn` in place of that turn and all after it.

        At its end the record is up to date and given to `keep`.
        """
        session = self._session_for(client, choices)
        before, notes_before = session.state, list(self.record.notes)
        if at_turn is not None:
            session.rewind(len(before["turns"]) - at_turn)
            del self.record.notes[at_turn:]

        def settle(answer: Answer) -> None:
            self.answer, self.ended = None, answer
            is_refused = len(session.state["turns"]) == len(self.record.notes)
            if not is_refused:
                self.record.notes.append(_note(answer))
            elif at_turn is not None:
                # The earlier turns come back. What the server has of them is unknown, so it will get them anew.
                self.session = client.session(state={**before, "history_tokens": None, "server_turns": 0})
                self.record.notes = notes_before
            self.record.state = self.state
            answer.left_out = is_refused and (at_turn is None or self.turns()[at_turn].question != question)
            keep(self.record)

        self.answer = Answer(session, question, choices.options, settle)
        return self.answer

    async def stop(self) -> None:
        """Stop the answer on its way, if there is one."""
        if self.answer is not None:
            await self.answer.stop()

    def _session_for(self, client: AsyncClient, choices: Choices) -> AsyncSession:
        state = self.state
        if (system_of(state), self.record.model or choices.model) != (choices.system, choices.model):
            self._retire(self.session)
            self.session = client.session(state=with_system(state, choices.system))
        elif self.session is None:
            self.session = client.session(state=state)
        self.record.model = choices.model
        return self.session

    def _retire(self, session: AsyncSession | None) -> None:
        ending = asyncio.create_task(end_quietly(session))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


async def end_quietly(session: AsyncSession | None) -> None:
    """Free a session on the server; one that cannot be reached expires by itself."""
    if session is not None:
        with contextlib.suppress(LimpetError):
            await session.end()


def system_of(state: SessionState) -> str:
    """The system prompt that a session begins with, "" without one."""
    first: list[dict[str, Any]] = state["transcript"][:1]
    return str(first[0]["content"]) if first and first[0]["role"] == "system" else ""


def with_system(state: SessionState, system: str) -> SessionState:
    """A session not yet begun, of the same turns behind another system prompt."""
    old = 1 if system_of(state) else 0
    opening = [{"role": "system", "content": system}] if system else []
    shift = len(opening) - old
    return SessionState(
        id=new_id(),
        transcript=[*opening, *state["transcript"][old:]],
        turns=[turn + shift for turn in state["turns"]],
        history_tokens=None,
        server_turns=0,
    )


def _note(answer: Answer) -> str:
    parts = [] if answer.result is None else [answer.result.summary()]
    return " · ".join([*parts, f"broke off: {answer.error}"] if answer.error is not None else parts)
