"""A conversation of the asyncio client that the server remembers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Literal, overload

from limpet.client.aio_stream import AsyncStream, start
from limpet.client.conversation import CANCEL_RETRY_S, CANCEL_TIMEOUT_S, Conversation, SessionState, Turn
from limpet.client.endpoint import ADMIN_TIMEOUT_S
from limpet.client.errors import LimpetError, NotFound
from limpet.client.exchange import Exchange, end_request, turn_request
from limpet.client.options import Messages
from limpet.client.results import Generation
from limpet.client.wire import new_id

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Unpack

    from limpet.client.aio_client import AsyncClient
    from limpet.client.options import Options


class AsyncSession:
    """Made by `AsyncClient.session`; one turn at a time, ended by `end` or a `async with` block.

    The server keeps the conversation's key/value cache, so a turn pays only for its new tokens. The transcript is kept
    here too: an answer that is closed or breaks off stays in it as far as it arrived, and so on the server.
    """

    def __init__(self, client: AsyncClient, conversation: Conversation, *, replay: bool) -> None:
        self._client = client
        self._conversation = conversation
        self._replay = replay

    @property
    def id(self) -> str:
        return self._conversation.id

    @property
    def transcript(self) -> list[dict[str, Any]]:
        """The messages so far, the system prompt first; a copy."""
        return self.state["transcript"]

    @property
    def history_tokens(self) -> int | None:
        """Tokens of the server's history as received; None before the first answer."""
        return self._conversation.history_tokens

    @property
    def state(self) -> SessionState:
        """The session as plain JSON values, for `AsyncClient.session(state=...)` in another process or later."""
        return self._conversation.state()

    @overload
    async def ask(
        self, question: str | Messages, *, stream: Literal[False] = ..., **options: Unpack[Options]
    ) -> Generation: ...
    @overload
    async def ask(
        self, question: str | Messages, *, stream: Literal[True], **options: Unpack[Options]
    ) -> AsyncStream: ...
    async def ask(
        self, question: str | Messages, *, stream: bool = False, **options: Unpack[Options]
    ) -> Generation | AsyncStream:
        """The next turn: the user's message, or several messages (tools' results) that end with a question."""
        turn = Turn(self._conversation, question, may_replay=self._replay)
        build = turn_request(turn, await self._client.model(), stream=stream, options=options)
        return await start(self._client.connection, Exchange(build, turn), self._client.timeout_s, stream)

    def rewind(self, turns: int = 1) -> None:
        """Forget the last turns, here at once and on the server with the next question; ValueError if too many."""
        self._conversation.rewind(turns)

    async def fork(self) -> AsyncSession:
        """A second conversation that goes on from here; on the server both share what is cached of their past.

        Where the server has lost it, the fork's first question sends it again. Raises SessionBusy while a turn runs.
        """
        twin = self._conversation.fork(new_id())
        if twin.history_tokens is not None:
            try:
                await self._client.fork_session(self.id, twin.id)
            except NotFound:
                twin.forget()
        return AsyncSession(self._client, twin, replay=self._replay)

    async def cancel(self) -> None:
        """Stop the running answer: its stream ends with finish_reason "cancelled". Silent if there is none."""
        deadline = time.monotonic() + CANCEL_TIMEOUT_S
        while not await self._client.cancel(session_id=self.id):
            if not self._conversation.is_waiting or time.monotonic() > deadline:
                return
            await asyncio.sleep(CANCEL_RETRY_S)  # the question is still on its way to the engine

    async def end(self) -> None:
        """Free the session on the server, cancelling what runs; a later question begins it again."""
        exchange = Exchange(end_request(self._conversation, await self._client.model()))
        self._conversation.forget()
        await start(self._client.connection, exchange, ADMIN_TIMEOUT_S, stream=False)

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(LimpetError):  # a session that cannot be ended now expires by itself
            await self.end()
