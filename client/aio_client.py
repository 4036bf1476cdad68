"""The asyncio client: the same as the blocking one, with `await` and `async for`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from tritonclient.grpc import service_pb2 as pb

from limpet.client.aio_connection import AsyncConnection
from limpet.client.aio_session import AsyncSession
from limpet.client.aio_stream import AsyncStream, start
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
from limpet.client.wire import build_admin_request, build_request, read_admin_response

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Unpack

    from limpet.client.options import Options


class AsyncClient:
    """A connection to one Limpet server, used on one event loop; closed by `close` or an `async with` block.

    `model` may be left out if the server has only one. `timeout_s` bounds each request from sending to its last
    token; without it a request may take as long as the server lives. Every failure is a LimpetError.
    """

    def __init__(
        self, address: str, *, model: str | None = None, timeout_s: float | None = None, admin_key: str | None = None
    ) -> None:
        self.connection = AsyncConnection(address)
        self.timeout_s = timeout_s
        self._model = model
        self._admin_key = admin_key

    @property
    def address(self) -> str:
        return self.connection.address

    def for_model(self, model: str) -> AsyncClient:
        """A client of another model of the server, on the same connection: closing one closes both."""
        twin = copy.copy(self)
        twin._model = model
        return twin

    async def model(self) -> str:
        """The model that answers; found on the server if none was named."""
        if self._model is None:
            self._model = only_model(await self.models(), self.address)
        return self._model

    async def models(self) -> list[str]:
        """Names of the server's models that this client can talk to."""
        index = await self.connection.ask("RepositoryIndex", pb.RepositoryIndexRequest(), ADMIN_TIMEOUT_S)
        configs = {
            name: await self.connection.ask("ModelConfig", pb.ModelConfigRequest(name=name), ADMIN_TIMEOUT_S)
            for name in loaded_models(index)
        }
        return [name for name, config in configs.items() if speaks_contract(config)]

    @overload
    async def generate(
        self,
        prompt: str | None = ...,
        *,
        input_ids: Sequence[int] | None = ...,
        stream: Literal[False] = ...,
        apply_chat_template: bool | None = ...,
        **options: Unpack[Options],
    ) -> Generation: ...
    @overload
    async def generate(
        self,
        prompt: str | None = ...,
        *,
        input_ids: Sequence[int] | None = ...,
        stream: Literal[True],
        apply_chat_template: bool | None = ...,
        **options: Unpack[Options],
    ) -> AsyncStream: ...
    async def generate(
        self,
        prompt: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        stream: bool = False,
        apply_chat_template: bool | None = None,
        **options: Unpack[Options],
    ) -> Generation | AsyncStream:
        """Continue a raw prompt, given as text or as token ids; `stream` gives the answer piece by piece."""
        build = partial(
            build_request,
            await self.model(),
            prompt=prompt,
            input_ids=input_ids,
            stream=stream,
            apply_chat_template=apply_chat_template,
            options=options,
        )
        return await start(self.connection, Exchange(build), self.timeout_s, stream)

    @overload
    async def chat(
        self, messages: Messages, *, stream: Literal[False] = ..., **options: Unpack[Options]
    ) -> Generation: ...
    @overload
    async def chat(self, messages: Messages, *, stream: Literal[True], **options: Unpack[Options]) -> AsyncStream: ...
    async def chat(
        self, messages: Messages, *, stream: bool = False, **options: Unpack[Options]
    ) -> Generation | AsyncStream:
        """Answer a conversation that the server does not keep; its last message is the user's."""
        build = partial(build_request, await self.model(), messages=messages, stream=stream, options=options)
        return await start(self.connection, Exchange(build), self.timeout_s, stream)

    def session(
        self,
        *,
        system: str | None = None,
        id: str | None = None,
        state: SessionState | None = None,
        replay: bool = True,
    ) -> AsyncSession:
        """Begin a conversation that the server remembers, or take up one by the `state` it had.

        With `replay` the transcript is sent again where the server has lost the session (expired, restarted); without
        it that raises SessionNotFound.
        """
        conversation = Conversation.begin(system, id) if state is None else Conversation.restore(state)
        return AsyncSession(self, conversation, replay=replay)

    async def cancel(self, *, request_id: str | None = None, session_id: str | None = None) -> int:
        """Stop running answers, whoever asked for them; returns how many there were."""
        reply = await self.admin("cancel", request_id=request_id, session_id=session_id)
        return int(reply["cancelled"])

    async def status(self) -> dict[str, Any]:
        """State and counters of the engines: `ready`, `models` by name, `reason` if one is not ready."""
        return await self.admin("status")

    async def sessions(self) -> list[dict[str, Any]]:
        """The last 1,000 sessions used: session_id, tokens, turns, running, idle_s, blocks (device, host, none)."""
        return list((await self.admin("sessions"))["sessions"])

    async def fork_session(self, session_id: str, new_id: str | None = None) -> str:
        """Begin a session as a copy of an idle one, sharing its cache; its id, a random one if none is given."""
        forked = await self.admin("sessions", action="fork", session_id=session_id, new_session_id=new_id)
        return str(forked["session"]["session_id"])

    async def tokenize(self, text: str | None = None, *, messages: Messages | None = None) -> list[int]:
        """The ids of the prompt that `generate` makes of a text, or `chat` of messages."""
        return list((await self.admin("tokenize", model=await self.model(), text=text, messages=messages))["ids"])

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids as answers show it, without special tokens."""
        return str((await self.admin("detokenize", model=await self.model(), ids=list(ids)))["text"])

    async def ready(self) -> bool:
        """Whether the server answers requests now; never raises."""
        return await self.why_not_ready() is None

    async def why_not_ready(self) -> str | None:
        """None if the server answers requests now, else the reason; never raises."""
        try:
            return reason_not_ready(await self.admin("status", timeout_s=READY_TIMEOUT_S))
        except LimpetError as error:
            return str(error)

    async def admin(self, op: str, *, timeout_s: float = ADMIN_TIMEOUT_S, **arguments: Any) -> dict[str, Any]:
        """One operation of limpet_admin; arguments that are None are left out."""
        request = build_admin_request(op, {"model": self._model, "admin_key": self._admin_key, **arguments})
        return read_admin_response(await self.connection.ask("ModelInfer", request, timeout_s))

    async def close(self) -> None:
        """Cancel everything that runs and disconnect."""
        await self.connection.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
