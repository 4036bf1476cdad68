"""The reference of the session machine: what is known of sessions and requests, in plain lists."""

from dataclasses import dataclass, field

from limpet.backend.link.router import Connection

KEPT = '["the system prompt and the first turn left"]'  # messages of the first turn behind dropped ones


@dataclass
class ModelTurn:
    messages: str | None
    reply: list[int]
    end: int


@dataclass
class ModelSession:
    """What the reference knows of a session."""

    history: list[int] = field(default_factory=list)
    turns: list[ModelTurn] = field(default_factory=list)
    evictions_at_settle: int = -1
    is_stored: bool = False
    stored: tuple[list[int], list[ModelTurn]] = field(default_factory=lambda: ([], []))  # what outlives the engine

    def store(self) -> None:
        self.is_stored, self.stored = True, (self.history, list(self.turns))


@dataclass(eq=False)
class ModelRequest:
    """A request that the machine submitted."""

    connection: Connection
    key: int
    prompt: list[int]
    max_tokens: int
    session_id: str | None = None
    messages: str | None = None
    ends_session: bool = False
    turns: list[ModelTurn] = field(default_factory=list)
    exact_cached: int | None = None  # what num_cached_tokens must be, unless something was evicted since
    num_evictions: int = -1
    num_preemptions: int = 0  # of all requests when this one was submitted
    received: list[int] = field(default_factory=list)
    delivered: int = 0
    finish_reason: str | None = None
    evictions_at_end: int | None = None  # when the engine had ended the answer
    freed: bool = False  # its session was ended or restarted under it


def cut_history(session: ModelSession, num_tokens: int) -> tuple[list[int], list[ModelTurn]]:
    """History and turns truncated to a number of tokens, by the contract's words."""
    kept: list[ModelTurn] = []
    for turn in session.turns:
        if turn.end <= num_tokens:
            kept.append(turn)
            continue
        reply_start = turn.end - len(turn.reply)
        previous_end = kept[-1].end if kept else 0
        if num_tokens > previous_end:
            is_whole = num_tokens >= reply_start and session.history[reply_start : turn.end] == turn.reply
            reply = turn.reply[: num_tokens - reply_start] if is_whole else []
            kept.append(ModelTurn(turn.messages if is_whole else None, reply, num_tokens))
        break
    return session.history[:num_tokens], kept


def altered(history: list[int], turns: list[ModelTurn], head_end: int) -> tuple[list[int], list[ModelTurn]]:
    """The history as a template that drops something of an earlier reply would write it."""
    first = next((index for index, turn in enumerate(turns) if turn.end > head_end), None)
    if first is None or not turns[first].reply:
        return history, turns
    end = turns[first].end
    if history[end - len(turns[first].reply) : end] != turns[first].reply:
        return history, turns
    shifted = [ModelTurn(t.messages, t.reply, t.end - 1) if t.end >= end else t for t in turns]
    return history[: end - 1] + history[end:], shifted


def without_oldest(
    history: list[int], turns: list[ModelTurn], head_end: int, count: int
) -> tuple[list[int], list[ModelTurn]]:
    """The history without its oldest templated turns, as for a context that overflows; two tokens stay in front."""
    if count == 0:
        return history, turns
    raw = [turn for turn in turns if turn.end <= head_end]
    templated = turns[len(raw) :]
    end = templated[count - 1].end
    start = min(head_end + 2, end)
    left = [ModelTurn(turn.messages, turn.reply, turn.end - (end - start)) for turn in templated[count:]]
    if left:
        left[0].messages = KEPT
    return history[:start] + history[end:], [*raw, *left]
