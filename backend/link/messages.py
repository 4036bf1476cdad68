"""The messages between front ends and the engine process: msgspec structs over ZeroMQ (DEALER to ROUTER).

`key` is a number that the front end chooses; it names one request (or one admin call) on that front end's connection.
Token ids travel as little-endian int32 bytes (`pack_ids`, `unpack_ids`): a 32k history costs microseconds, not
milliseconds.

A stateless request:     Submit -> TokenOutput* (last one with finish_reason or error)
A turn of a session:     BeginTurn -> TurnBegun -> Submit -> TokenOutput* -> Settle -> Settled
                         BeginTurn -> Failed                     (busy, not found, ...: nothing is reserved)
                         BeginTurn -> TurnBegun -> Abandon       (no prompt could be built: the lease goes back)
The engine keeps a turn's session reserved until Settle says how many generated tokens were delivered; Settle may
come at any time after Submit and then also ends the generation (stop string, cancellation). If the front end is lost
the engine settles with the last Delivered watermark.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import msgspec
import numpy as np

from limpet.backend.sampling_params import SamplingParams

FinishReason: TypeAlias = Literal["stop", "length", "context_full", "cancelled"]
ErrorCode: TypeAlias = Literal["INVALID_ARG", "NOT_FOUND", "UNAVAILABLE", "CANCELLED", "INTERNAL"]
ERROR_CODES: tuple[ErrorCode, ...] = get_args(ErrorCode)


def pack_ids(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(packed, dtype="<i4").tolist()
    return ids


class Message(msgspec.Struct, tag=True, array_like=True):
    """Base of all link messages; the tag is the class name."""


# ---- front end -> engine


class Hello(Message):
    """First message of a connection. `shm_region` is the stub's file in /dev/shm, removed by the engine if all die."""

    front_end: str
    pid: int
    role: Literal["front_end", "admin"]
    shm_region: str | None = None


class Bye(Message):
    """The front end leaves on purpose."""


class BeginTurn(Message):
    """Reserve a session for a turn, atomically; answered by TurnBegun or Failed.

    `truncate_to` (the contract's session_tokens) cuts the history to that many tokens first; `rewind` then drops that
    many whole turns.
    """

    key: int
    session_id: str
    start: bool
    end: bool
    truncate_to: int | None = None
    rewind: int = 0


class Submit(Message):
    """Start generating. For a turn (`key` of a BeginTurn) `prompt` is the whole conversation's ids.

    `messages` is the turn's own new messages (JSON, opaque to the engine, returned in later TurnBegun views); None for
    a raw turn, whose prompt begins with the unchanged history. `turn_ends[i]` is where the i-th turn of the view ends
    inside `prompt` (templated turns only). Of the view's turns the first `num_dropped_turns` are dropped (and not among
    `turn_ends`); `first_messages` then replaces the messages of the first one left.
    """

    key: int
    request_id: str
    prompt: bytes
    params: SamplingParams
    messages: str | None = None
    turn_ends: list[int] = []
    num_dropped_turns: int = 0
    first_messages: str | None = None
    priority: int = 0
    timeout_ms: int | None = None
    cache_salt: str = ""
    arrived_at: float | None = None  # time.monotonic() when the front end got the request


class Abandon(Message):
    """Give a reserved turn back unused; the session is as it was before (a session begun by it vanishes)."""

    key: int


class Delivered(Message):
    """Watermarks: `counts[i]` generated tokens of request `keys[i]` have been handed to `send`."""

    keys: list[int]
    counts: list[int]


class Settle(Message):
    """End of a request from the front end's side: keep `keep` generated tokens in the session's history.

    For a request still generating this stops it (within a step). `cancelled` only labels logs and metrics. A turn is
    answered by Settled; a stateless request gets no answer. For an unknown key: silent.
    """

    key: int
    keep: int
    cancelled: bool = False


class StillRunning(Message):
    """Answer to PollCancel: the client of this request is still there."""

    key: int


class EndSession(Message):
    """Free a session (contract: end with empty text): cancels a running turn; unknown id is a silent no-op.

    Answered by Settled with `session_tokens` 0.
    """

    key: int
    session_id: str


class Admin(Message):
    """An operation of limpet_admin; `arguments` is a JSON object. Answered by AdminReply or Failed."""

    key: int
    op: str
    arguments: str


class Ping(Message):
    """Heartbeat, both ways, every HEARTBEAT_S; a front end's carries how many errors it answered since the last one."""

    errors: dict[ErrorCode, int] = {}


# ---- engine -> front end


class ModelInfo(msgspec.Struct):
    """What a front end needs to know of the running engine."""

    engine_pid: int
    session_len: int  # effective: config capped by the cache
    vocab_size: int
    max_batch_size: int
    eos_token_ids: list[int]


class Welcome(Message):
    """Answer to Hello."""

    info: ModelInfo


class TurnView(msgspec.Struct, array_like=True):
    """An earlier turn: its new messages (JSON list of {role, content}) and the ids that the model answered."""

    messages: str
    reply: bytes


class TurnBegun(Message):
    """The session as the template needs it.

    `head` is the history up to and including the last raw turn (empty if there was none); `turns` are the templated
    turns after it, in order.
    """

    key: int
    history_len: int
    head: bytes
    turns: list[TurnView]


class TokenLogprob(msgspec.Struct, array_like=True):
    """An id's logprob and rank (1: the likeliest) in the model's own distribution, and the likeliest ids."""

    logprob: float
    rank: int
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class TokenOutput(msgspec.Struct, array_like=True):
    """New tokens of one request. The last one carries `finish_reason` or (`error_code`, `error`).

    `logprobs` is empty or as long as `ids`; `prompt_logprobs`, of the prompt's ids after the first, come with the first
    tokens.
    """

    key: int
    ids: list[int]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0  # constant over a request's outputs
    error_code: ErrorCode | None = None
    error: str = ""
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []


class Outputs(Message):
    """All outputs of one step for one front end."""

    items: list[TokenOutput]


class Failed(Message):
    """The request `key` was refused; nothing else follows for it."""

    key: int
    code: ErrorCode
    message: str


class Settled(Message):
    """The session's history now has `session_tokens` tokens."""

    key: int
    session_tokens: int


class PollCancel(Message):
    """Somebody wants the session of this request: poll its cancel flag now; answer Settle or StillRunning."""

    key: int


class CancelRequested(Message):
    """limpet_admin cancelled this request: finish it as cancelled and Settle."""

    key: int


class AdminReply(Message):
    """JSON result of an Admin call."""

    key: int
    result: str


ToEngine: TypeAlias = (
    Hello | Bye | BeginTurn | Submit | Abandon | Delivered | Settle | StillRunning | EndSession | Admin | Ping
)
ToFrontEnd: TypeAlias = (
    Welcome | TurnBegun | Outputs | Failed | Settled | PollCancel | CancelRequested | AdminReply | Ping
)

HEARTBEAT_S = 0.5
LOST_AFTER_S = 5.0  # silence after which the other side counts as lost (a dead process is noticed by pidfd at once)
