"""The client's half of a session, without I/O: the transcript, and what the server is known to hold of it."""

from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from limpet.client.errors import Cancelled, ConnectionLost, LimpetError, RequestTimeout, ServerError, SessionNotFound
from limpet.client.options import Messages
from limpet.client.results import Chunk
from limpet.client.wire import SessionFields, copied_messages, new_id

CANCEL_TIMEOUT_S, CANCEL_RETRY_S = 5.0, 0.01  # for a question that the engine has not seen yet
# After these nobody can say whether the server began the turn.
_DOUBTFUL = (Cancelled, ConnectionLost, RequestTimeout, ServerError)


class SessionState(TypedDict):
    """A session as plain JSON values, to be kept and given to `Client.session(state=...)` later."""

    id: str
    transcript: list[dict[str, Any]]
    turns: list[int]
    history_tokens: int | None
    server_turns: int


@dataclass
class Conversation:
    """Transcript and bookkeeping of one session; at most one Turn of it is open at a time."""

    id: str
    transcript: list[dict[str, Any]] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)  # where each turn begins in the transcript
    history_tokens: int | None = None  # tokens of the history as received; None: begin it (again) from the transcript
    server_turns: int = 0  # turns since the session was begun: only so many can be rewound on the server
    pending_rewind: int = 0
    is_waiting: bool = False  # a question was sent and nothing of its answer has come

    @classmethod
    def begin(cls, system: str | None, id: str | None) -> "Conversation":
        """An empty conversation, with a random id if none is given."""
        return cls(id or new_id(), [{"role": "system", "content": system}] if system else [])

    @classmethod
    def restore(cls, state: SessionState) -> "Conversation":
        """The conversation that `state` describes."""
        return cls(
            id=state["id"],
            transcript=[dict(message) for message in state["transcript"]],
            turns=list(state["turns"]),
            history_tokens=state["history_tokens"],
            server_turns=state["server_turns"],
        )

    def state(self) -> SessionState:
        """Plain values for `restore`; a rewind that no turn has carried out yet is kept as a new beginning."""
        return SessionState(
            id=self.id,
            transcript=[dict(message) for message in self.transcript],
            turns=list(self.turns),
            history_tokens=None if self.pending_rewind else self.history_tokens,
            server_turns=self.server_turns,
        )

    def rewind(self, turns: int) -> None:
        """Drop the last `turns` turns; raises ValueError if there are fewer."""
        if not 0 <= turns <= len(self.turns):
            raise ValueError(f"Cannot rewind {turns} turns: the session has {len(self.turns)}.")
        if turns == 0:
            return
        del self.transcript[self.turns[-turns] :]
        del self.turns[-turns:]
        self.pending_rewind += turns
        if self.pending_rewind >= self.server_turns:
            self.forget()

    def fork(self, id: str) -> "Conversation":
        """A second conversation that goes on from here."""
        transcript = [dict(message) for message in self.transcript]
        return replace(self, id=id, transcript=transcript, turns=list(self.turns), is_waiting=False)

    def forget(self) -> None:
        """The server's history is gone or unknown: the next turn begins the session again from the transcript."""
        self.history_tokens = None
        self.server_turns = 0
        self.pending_rewind = 0


class Turn:
    """One question to a conversation, from the request to the last chunk."""

    def __init__(self, conversation: Conversation, question: str | Messages, *, may_replay: bool) -> None:
        self._conversation = conversation
        self._question = question
        self._may_replay = may_replay
        self._received = False
        self._reply: dict[str, Any] = {"role": "assistant", "content": ""}
        self._prepare()

    def _prepare(self) -> None:
        conversation = self._conversation
        start = conversation.history_tokens is None
        self.fields = SessionFields(conversation.id, start, conversation.history_tokens, conversation.pending_rewind)
        self.replayed = start and bool(conversation.turns)  # earlier turns are sent again with this one

    def content(self) -> dict[str, Any]:
        """The request's `prompt` or `messages`."""
        if self.fields.start and self._conversation.transcript:
            return {"messages": [*self._conversation.transcript, *self._new_messages()]}
        key = "prompt" if isinstance(self._question, str) else "messages"
        return {key: self._question}

    def sent(self) -> None:
        """Note that the request is built and goes out now."""
        self._conversation.is_waiting = True

    def accept(self, chunk: Chunk) -> None:
        """Take a chunk into the transcript."""
        conversation = self._conversation
        if not self._received:
            self._received = True
            conversation.is_waiting = False
            conversation.pending_rewind = 0
            begins = self.fields.start or chunk.num_dropped_turns > 0  # earlier turns may be gone: they are not counted
            conversation.server_turns = 1 if begins else conversation.server_turns + 1
            conversation.turns.append(len(conversation.transcript))
            conversation.transcript += [*self._new_messages(), self._reply]
        self._reply["content"] += chunk.text
        conversation.history_tokens = chunk.session_tokens

    def failed(self, error: LimpetError) -> bool:
        """Note how the turn ended; True if it has to be sent again, as a replay of the transcript."""
        if self._received:
            return False
        conversation = self._conversation
        if isinstance(error, SessionNotFound):
            conversation.forget()
            conversation.is_waiting = self._may_replay and not self.fields.start
            self._prepare()
            return conversation.is_waiting
        conversation.is_waiting = False
        if isinstance(error, _DOUBTFUL) and conversation.pending_rewind:
            conversation.forget()
        return False

    def _new_messages(self) -> list[dict[str, Any]]:
        if isinstance(self._question, str):
            return [{"role": "user", "content": self._question}]
        return copied_messages(self._question)
