"""One request from Triton's hands to its FINAL response: a state machine that its sender thread runs.

    PREPARING   a worker checks the request (and tokenizes a stateless prompt)
    BEGINNING   BeginTurn was sent                            sessions only
    BUILDING    a worker builds the turn's prompt             sessions only
    GENERATING  Submit was sent
    SETTLING    Settle was sent; its answer allows FINAL      sessions only: stop string, cancelled by limpet_admin,
                                                              and each end of a turn that is to be stored
    ENDING      EndSession was sent
    DONE        FINAL was sent, exactly once

Other threads only put events into the inbox.
"""

import enum
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeAlias

from limpet.backend.detokenizer import Detokenizer
from limpet.backend.front_end.answer_logprobs import AnswerLogprobs
from limpet.backend.front_end.answer_text import AnswerText
from limpet.backend.front_end.errors import RequestError
from limpet.backend.front_end.prompts import Prompt, PromptBuilder
from limpet.backend.front_end.request import GenerationRequest, RawRequest
from limpet.backend.front_end.responses import AnswerPart, Responder
from limpet.backend.front_end.senders import SenderThread
from limpet.backend.link.connection import EngineConnection, EngineUnavailableError, RequestEvent
from limpet.backend.link.messages import (
    Abandon,
    BeginTurn,
    CancelRequested,
    EndSession,
    ErrorCode,
    Failed,
    FinishReason,
    PollCancel,
    Settle,
    Settled,
    StillRunning,
    TokenOutput,
    TurnBegun,
)

_logger = logging.getLogger(__name__)
_CANCELLED = "The client cancelled the request."
_INTERNAL = "The request failed inside the server; its log says why."


@dataclass(frozen=True)
class Services:
    """What all answers of a front end share."""

    connection: EngineConnection
    prompts: PromptBuilder
    new_detokenizer: Callable[[], Detokenizer]
    token_text: Callable[[int], str]
    workers: Executor
    is_durable: bool = False  # FINAL waits until the engine has stored the turn


@dataclass(frozen=True)
class Read:
    """A worker has checked the request; a stateless one has its prompt."""

    request: GenerationRequest
    prompt: Prompt | None


@dataclass(frozen=True)
class Built:
    """A worker has built the turn's prompt."""

    prompt: Prompt


@dataclass(frozen=True)
class Refused:
    """A worker found what is wrong."""

    error: RequestError


Event: TypeAlias = RequestEvent | Read | Built | Refused


class State(enum.Enum):
    PREPARING = enum.auto()
    BEGINNING = enum.auto()
    BUILDING = enum.auto()
    GENERATING = enum.auto()
    SETTLING = enum.auto()
    ENDING = enum.auto()
    DONE = enum.auto()


class Answer:
    """The request's state; everything but `start` and `deliver` runs on its sender thread."""

    def __init__(self, services: Services, thread: SenderThread, responder: Responder) -> None:
        self._services = services
        self._connection = services.connection
        self._thread = thread
        self._responder = responder
        self._arrived_at = time.monotonic()
        self._state = State.PREPARING
        self._inbox: deque[Event] = deque()
        self._is_scheduled = False
        self._is_cancelled = False  # while BEGINNING, where nothing can be taken back yet
        self._is_stopped = False  # by limpet_admin while BUILDING: the prompt still becomes part of the history
        self._key = 0
        self._request: GenerationRequest
        self._prompt: Prompt
        self._text: AnswerText
        self._logprobs = AnswerLogprobs(services.token_text)
        self._ids: list[int] = []  # generated
        self._num_reported = 0  # of them, told to the client
        self._pending = ""  # text for the next response
        self._num_cached_tokens = 0
        self._reason: FinishReason = "stop"

    # ---- from other threads

    def start(self, raw: RawRequest) -> None:
        """Begin with what Triton delivered."""
        self._thread.watch(self)
        self._services.workers.submit(self._work, lambda: self._read(raw))

    def deliver(self, event: Event) -> None:
        """Queue an event; one run of the sender thread takes all that have gathered."""
        self._inbox.append(event)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._thread.run(self._run)

    def _work(self, task: Callable[[], Event]) -> None:
        """On a worker thread: the task's result, or its refusal, becomes an event."""
        try:
            event = task()
        except RequestError as error:
            event = Refused(error)
        except Exception:
            _logger.exception("A request failed in a worker.")
            event = Refused(RequestError(_INTERNAL, "INTERNAL"))
        self.deliver(event)

    def _read(self, raw: RawRequest) -> Read:
        request = self._services.prompts.read(raw)
        return Read(request, self._services.prompts.stateless(request) if request.session is None else None)

    # ---- on the sender thread

    @property
    def is_done(self) -> bool:
        return self._state is State.DONE

    def poll_cancel(self) -> None:
        """Look whether the client has gone."""
        if self._responder.is_cancelled():
            self._cancel()

    def _run(self) -> None:
        self._is_scheduled = False
        try:
            while self._inbox and not self.is_done:
                self._handle(self._inbox.popleft())
            self._send_pending()
        except Exception:
            _logger.exception("A request failed in its sender thread.")
            self._give_back(self._num_reported)
            self._fail("INTERNAL", _INTERNAL)

    def _handle(self, event: Event) -> None:
        match event:
            case TokenOutput():
                self._on_output(event)
            case Read(request, prompt):
                self._on_read(request, prompt)
            case TurnBegun():
                self._on_turn_begun(event)
            case Built(prompt):
                self._submit(prompt)
            case Refused(error):
                self._give_back(0)
                self._fail(error.code, error.message)
            case Failed():
                self._fail(event.code, event.message)
            case Settled():
                self._on_settled(event)
            case PollCancel():
                self._on_poll_cancel()
            case CancelRequested():
                self._on_cancel_requested()

    def _on_read(self, request: GenerationRequest, prompt: Prompt | None) -> None:
        self._request = request
        self._pending = request.prepended_text
        self._text = AnswerText(self._services.new_detokenizer(), request.stop_strings)
        try:
            self._key = self._connection.open(self)
        except EngineUnavailableError as error:
            self._fail("UNAVAILABLE", str(error))
            return
        if prompt is not None:
            self._submit(prompt)
        elif request.content is None:
            self._end_session()
        else:
            self._begin_turn()

    def _begin_turn(self) -> None:
        session = self._request.session
        assert session is not None
        self._state = State.BEGINNING
        self._connection.send(
            BeginTurn(
                key=self._key,
                session_id=session.session_id,
                start=session.start,
                end=session.end,
                truncate_to=session.truncate_to,
                rewind=session.rewind,
            )
        )

    def _end_session(self) -> None:
        session = self._request.session
        assert session is not None
        self._state = State.ENDING
        self._connection.send(EndSession(key=self._key, session_id=session.session_id))

    def _on_turn_begun(self, begun: TurnBegun) -> None:
        self._state = State.BUILDING
        if self._is_cancelled:
            self._cancel()
            return
        request = self._request
        self._services.workers.submit(self._work, lambda: Built(self._services.prompts.turn(request, begun)))

    def _submit(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._state = State.GENERATING
        self._connection.send(prompt.submit(self._key, self._request, self._arrived_at))
        if self._is_stopped:
            self._settle(0, "cancelled")

    def _on_output(self, output: TokenOutput) -> None:
        if self._state is not State.GENERATING:
            return  # computed before the engine had read the Settle
        self._num_cached_tokens = output.num_cached_tokens
        if output.error_code is not None:
            self._send_pending()
            self._give_back(self._num_reported)
            self._fail(output.error_code, output.error)
            return
        self._ids += output.ids
        self._logprobs.add(output.logprobs, output.prompt_logprobs)
        ends_by_id = output.finish_reason == "stop" and bool(output.ids)
        self._pending += self._text.feed(output.ids[:-1] if ends_by_id else output.ids)
        if self._text.is_stopped:
            self._settle(self._text.num_tokens_kept, "stop")
        elif output.finish_reason is not None:
            self._pending += self._text.finish()
            self._end(output.finish_reason)

    def _end(self, reason: FinishReason) -> None:
        """The engine has ended the answer by itself: all of it is kept, and only a store has to be waited for."""
        if self._services.is_durable:
            self._settle(len(self._ids), reason)
            return
        if self._request.session is not None:
            self._connection.send(Settle(key=self._key, keep=len(self._ids)))
        self._send_final(reason)

    def _settle(self, keep: int, reason: FinishReason) -> None:
        """End the answer from this side: the session's history must be cut before FINAL lets the next turn come."""
        del self._ids[keep:]
        self._reason = reason
        self._connection.send(Settle(key=self._key, keep=keep, cancelled=reason == "cancelled"))
        if self._request.session is not None:
            self._state = State.SETTLING
        else:
            self._send_final(reason)

    def _on_settled(self, settled: Settled) -> None:
        if self._state is State.ENDING:
            self._finish(AnswerPart(text="", finish_reason="stop"))
        elif self._state is State.SETTLING:
            self._send_final(self._reason)

    def _on_poll_cancel(self) -> None:
        self.poll_cancel()
        if not self.is_done:
            self._connection.send(StillRunning(key=self._key))

    def _on_cancel_requested(self) -> None:
        if self._state is State.BUILDING:
            self._is_stopped = True
        elif self._state is State.GENERATING:
            self._pending += self._text.release()
            self._settle(self._text.num_tokens_shown, "cancelled")

    def _cancel(self) -> None:
        """The client has gone: nothing more is sent to it, so only what had been sent is kept."""
        if self._state is State.BEGINNING:
            self._is_cancelled = True
        elif self._state in (State.PREPARING, State.BUILDING, State.GENERATING):
            self._give_back(self._num_reported)
            self._fail("CANCELLED", _CANCELLED)

    def _give_back(self, keep: int) -> None:
        """Let the engine have back what it reserved for this request."""
        if self._state is State.GENERATING:
            self._connection.send(Settle(key=self._key, keep=keep, cancelled=True))
        elif self._state in (State.BEGINNING, State.BUILDING):
            self._connection.send(Abandon(key=self._key))

    # ---- responses

    def _send_pending(self) -> None:
        """Send the text that has gathered, if the client streams; the end is sent by `_send_final`."""
        if self._state is not State.GENERATING or not self._pending or not self._request.stream:
            return
        self._respond(self._text.num_tokens_shown, None)
        if self._request.session is not None:
            self._connection.delivered(self._key, self._num_reported)

    def _send_final(self, reason: FinishReason) -> None:
        self._respond(len(self._ids), reason)

    def _respond(self, num_tokens: int, reason: FinishReason | None) -> None:
        """Send the pending text together with the ids up to `num_tokens`."""
        start, self._num_reported = self._num_reported, num_tokens
        ids = self._ids[start:num_tokens]
        text, self._pending = self._pending, ""
        outputs = self._request.outputs
        part = AnswerPart(
            text=text,
            ids=ids,
            finish_reason=reason,
            num_input_tokens=self._prompt.num_input_tokens,
            num_cached_tokens=self._num_cached_tokens,
            session_tokens=len(self._prompt.ids) + num_tokens if self._request.session is not None else 0,
            num_dropped_turns=self._prompt.shortened.num_exchanges,
            log_probs=self._logprobs.values(start, num_tokens),
            cumulative_logprob=self._logprobs.cumulative(num_tokens),
            logprobs=self._logprobs.written(ids, start) if outputs.logprobs else "[]",
            prompt_logprobs=self._logprobs.prompt_written(self._prompt.ids) if outputs.prompt_logprobs else None,
        )
        if reason is None:
            self._responder.send(part, self._request.outputs)
        else:
            self._finish(part)

    def _finish(self, part: AnswerPart) -> None:
        self._close()
        self._responder.send(part, self._request.outputs)

    def _fail(self, code: ErrorCode, message: str) -> None:
        if not self._responder.is_finished:
            self._close()
            self._connection.count_error(code)
            self._responder.fail(code, message)

    def _close(self) -> None:
        self._state = State.DONE
        self._connection.close(self._key)
