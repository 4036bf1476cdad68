"""Server-sent events, and what happens when the client goes away."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from limpet.client.api.problems import Problem, problem
from limpet.client.errors import LimpetError

Result = TypeVar("Result")
_DONE = b"data: [DONE]\n\n"
_NOT_TO_BE_BUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # by proxies


def json_response(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """ASCII, since a refusal may quote what is no valid Unicode."""
    return Response(json.dumps(body), status, headers, "application/json")


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; it is cancelled, and ClientDisconnect raised, if the client closes the connection."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait((task, gone))


class EventStream(StreamingResponse):
    """Server-sent events; their source is closed at once when the client goes away, not when memory is collected."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().stream_response(send)


async def event_stream(request: Request, bodies: AsyncGenerator[Mapping[str, Any]]) -> Response:
    """The bodies as events. The first one is awaited, so that a refusal has a status of its own."""
    first = await unless_gone(request, _next(bodies))
    return EventStream(_events(first, bodies), headers=_NOT_TO_BE_BUFFERED)


async def _next(bodies: AsyncGenerator[Mapping[str, Any]]) -> Mapping[str, Any]:
    return await anext(bodies)


async def _events(first: Mapping[str, Any], bodies: AsyncGenerator[Mapping[str, Any]]) -> AsyncGenerator[bytes]:
    async with aclosing(bodies):
        yield _event(first)
        try:
            async for body in bodies:
                yield _event(body)
        except LimpetError as error:
            yield _event(problem(error).body)
        except Problem as refused:
            yield _event(refused.body)
    yield _DONE


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
