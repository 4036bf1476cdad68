"""The blocking client."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from tritonclient.grpc import service_pb2 as pb

from limpet.client.connection import Connection
from limpet.client.conversation import Conversation, SessionState
from limpet.client.endpoint import (
    ADMIN_TIMEOUT_S,
    READY_TIMEOUT_S,
    loaded_models,
    only_model,
    reason_not_ready,
    speaks_contract,
)
from limpet.client.errors import LimpetError
from limpet.client.exchange import Exchange
from limpet.client.options import Messages
from limpet.client.results import Generation
from limpet.client.session import Session
from limpet.client.stream import Stream, start
from limpet.client.wire import build_admin_request, build_request, read_admin_response

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Unpack

    from limpet.client.options import Options


class Client:
    """A connection to one Limpet server; usable from several threads, closed by `close` or a `with` block.

    `model` may be left out if the server has only one. `timeout_s` bounds each request from sending to its last
    token; without it a request may take as long as the server lives. Every failure is a LimpetError.
    """

    def __init__(
        self, address: str, *, model: str | None = None, timeout_s: float | None = None, admin_key: str | None = None
    ) -> None:
        self.connection = Connection(address)
        self.timeout_s = timeout_s
        self._model = model
        self._admin_key = admin_key

    @property
    def address(self) -> str:
        return self.connection.address

    def for_model(self, model: str) -> Client:
        """A client of another model of the server, on the same connection: closing one closes both."""
        twin = copy.copy(self)
        twin._model = model
        return twin

    @property
    def model(self) -> str:
        """The model that answers; found on the server if none was named."""
        if self._model is None:
            self._model = only_model(self.models(), self.address)
        return self._model

    def models(self) -> list[str]:
        """Names of the server's models that this client can talk to."""
        index = self.connection.ask("RepositoryIndex", pb.RepositoryIndexRequest(), ADMIN_TIMEOUT_S)
        configs = {
            name: self.connection.ask("ModelConfig", pb.ModelConfigRequest(name=name), ADMIN_TIMEOUT_S)
            for name in loaded_models(index)
        }
        return [name for name, config in configs.items() if speaks_contract(config)]

    @overload
    def generate(
        self,
        prompt: str | None = ...,
        *,
        input_ids: Sequence[int] | None = ...,
        stream: Literal[False] = ...,
        apply_chat_template: bool | None = ...,
        **options: Unpack[Options],
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompt: str | None = ...,
        *,
        input_ids: Sequence[int] | None = ...,
        stream: Literal[True],
        apply_chat_template: bool | None = ...,
        **options: Unpack[Options],
    ) -> Stream: ...
    def generate(
        self,
        prompt: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        stream: bool = False,
        apply_chat_template: bool | None = None,
        **options: Unpack[Options],
    ) -> Generation | Stream:
        """Continue a raw prompt, given as text or as token ids; `stream` gives the answer piece by piece."""
        build = partial(
            build_request,
            self.model,
            prompt=prompt,
            input_ids=input_ids,
            stream=stream,
            apply_chat_template=apply_chat_template,
            options=options,
        )
        return start(self.connection, Exchange(build), self.timeout_s, stream)

    @overload
    def chat(self, messages: Messages, *, stream: Literal[False] = ..., **options: Unpack[Options]) -> Generation: ...
    @overload
    def chat(self, messages: Messages, *, stream: Literal[True], **options: Unpack[Options]) -> Stream: ...
    def chat(self, messages: Messages, *, stream: bool = False, **options: Unpack[Options]) -> Generation | Stream:
        """Answer a conversation that the server does not keep; its last message is the user's."""
        build = partial(build_request, self.model, messages=messages, stream=stream, options=options)
        return start(self.connection, Exchange(build), self.timeout_s, stream)

    def session(
        self,
        *,
        system: str | None = None,
        id: str | None = None,
        state: SessionState | None = None,
        replay: bool = True,
    ) -> Session:
        """Begin a conversation that the server remembers, or take up one by the `state` it had.

        With `replay` the transcript is sent again where the server has lost the session (expired, restarted); without
        it that raises SessionNotFound.
        """
        conversation = Conversation.begin(system, id) if state is None else Conversation.restore(state)
        return Session(self, conversation, replay=replay)

    def cancel(self, *, request_id: str | None = None, session_id: str | None = None) -> int:
        """Stop running answers, whoever asked for them; returns how many there were."""
        reply = self.admin("cancel", request_id=request_id, session_id=session_id)
        return int(reply["cancelled"])

    def status(self) -> dict[str, Any]:
        """State and counters of the engines: `ready`, `models` by name, `reason` if one is not ready."""
        return self.admin("status")

    def sessions(self) -> list[dict[str, Any]]:
        """The last 1,000 sessions used: session_id, tokens, turns, running, idle_s, blocks (device, host, none)."""
        return list(self.admin("sessions")["sessions"])

    def fork_session(self, session_id: str, new_id: str | None = None) -> str:
        """Begin a session as a copy of an idle one, sharing its cache; its id, a random one if none is given."""
        forked = self.admin("sessions", action="fork", session_id=session_id, new_session_id=new_id)
        return str(forked["session"]["session_id"])

    def tokenize(self, text: str | None = None, *, messages: Messages | None = None) -> list[int]:
        """The ids of the prompt that `generate` makes of a text, or `chat` of messages."""
        return list(self.admin("tokenize", model=self.model, text=text, messages=messages)["ids"])

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids as answers show it, without special tokens."""
        return str(self.admin("detokenize", model=self.model, ids=list(ids))["text"])

    def ready(self) -> bool:
        """Whether the server answers requests now; never raises."""
        return self.why_not_ready() is None

    def why_not_ready(self) -> str | None:
        """None if the server answers requests now, else the reason; never raises."""
        try:
            return reason_not_ready(self.admin("status", timeout_s=READY_TIMEOUT_S))
        except LimpetError as error:
            return str(error)

    def admin(self, op: str, *, timeout_s: float = ADMIN_TIMEOUT_S, **arguments: Any) -> dict[str, Any]:
        """One operation of limpet_admin; arguments that are None are left out."""
        request = build_admin_request(op, {"model": self._model, "admin_key": self._admin_key, **arguments})
        return read_admin_response(self.connection.ask("ModelInfer", request, timeout_s))

    def close(self) -> None:
        """Cancel everything that runs and disconnect."""
        self.connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
