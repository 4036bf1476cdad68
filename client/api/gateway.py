"""The server behind the endpoint: which models it has, and answers as streams of chunks."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from limpet.client.aio_client import AsyncClient
from limpet.client.aio_stream import AsyncStream
from limpet.client.api.problems import Problem
from limpet.client.endpoint import ADMIN_TIMEOUT_S
from limpet.client.errors import LimpetError, SessionNotFound
from limpet.client.exchange import Exchange
from limpet.client.options import Options
from limpet.client.results import Chunk
from limpet.client.wire import SessionFields, build_request

_MODELS_STAY_S = 5.0


@dataclass(frozen=True)
class SessionTurn:
    """A turn of an interactive session; `start` None: begin the session if it is not there, but to rewind it."""

    id: str
    start: bool | None = None
    end: bool = False
    rewind: int = 0

    def attempts(self) -> list[SessionFields]:
        """What to send, the next one if the session is not found."""
        starts = ((False,) if self.rewind else (False, True)) if self.start is None else (self.start,)
        return [SessionFields(self.id, start=start, rewind=self.rewind, end=self.end) for start in starts]


@dataclass(frozen=True)
class Question:
    """One request to a model; `content` is build_request's prompt, input_ids or messages."""

    model: str
    content: Mapping[str, Any]
    options: Options
    stream: bool
    turn: SessionTurn | None = None


class Gateway:
    """Shared by all requests; keeps nothing of any of them."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self._models: list[str] = []
        self._models_read_at = float("-inf")
        self._reading_models = asyncio.Lock()  # many requests at once ask once

    async def models(self) -> list[str]:
        """Names of the models, asked for again after some seconds."""
        async with self._reading_models:
            if time.monotonic() - self._models_read_at > _MODELS_STAY_S:
                self._models = await self.client.models()
                self._models_read_at = time.monotonic()
            return self._models

    async def model(self, name: str | None) -> str:
        """The model of that name, or the only one; raises Problem."""
        models = await self.models()
        if name is None and len(models) == 1:
            return models[0]
        known = ", ".join(models) or "none"
        if name is None:
            raise Problem(f"Name a model; known are {known}.", 400, param="model")
        if name not in models:
            message = f"There is no model {name!r}; known are {known}."
            raise Problem(message, 404, code="model_not_found", param="model")
        return name

    async def answer(self, question: Question) -> AsyncGenerator[Chunk]:
        """The chunks of the answer, one if it is not streamed; closing the iterator cancels the request."""
        attempts = question.turn.attempts() if question.turn is not None else [None]
        for attempt in attempts:
            build = partial(
                build_request,
                question.model,
                stream=question.stream,
                options=question.options,
                session=attempt,
                **question.content,
            )
            try:
                async with AsyncStream(self.client.connection, Exchange(build), None) as stream:
                    async for chunk in stream:
                        yield chunk
                return
            except SessionNotFound:
                if attempt is attempts[-1]:
                    raise

    async def prompt_ids(self, question: Question) -> list[int] | None:
        """The ids of a question's prompt; None where only the engine knows them: in a session, and with tools."""
        if "input_ids" in question.content:
            return list(question.content["input_ids"])
        if question.turn is not None or question.options.get("tools"):
            return None
        client = self.client.for_model(question.model)
        return await client.tokenize(question.content.get("prompt"), messages=question.content.get("messages"))

    async def metrics(self) -> dict[str, dict[str, Any]]:
        """The counts of each model's engine, but for those that do not answer now."""
        counts = {}
        with contextlib.suppress(LimpetError):
            for name in await self.models():
                with contextlib.suppress(LimpetError):
                    counts[name] = await self.client.for_model(name).admin("metrics")
        return counts

    async def summaries(self) -> dict[str, dict[str, Any]]:
        """What each model's engine says of itself; an empty one where it does not answer."""
        status = await self.client.admin("status", timeout_s=ADMIN_TIMEOUT_S)
        return {name: each.get("engine", {}) for name, each in status.get("models", {}).items()}
