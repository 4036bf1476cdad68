"""The endpoint's routes."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from limpet.client.aio_client import AsyncClient
from limpet.client.api.chat import answer_chat, stream_chat
from limpet.client.api.completions import answer_completion, stream_completion
from limpet.client.api.events import event_stream, json_response, unless_gone
from limpet.client.api.gateway import Gateway
from limpet.client.api.keys import BearerKeys
from limpet.client.api.metrics import ApiMetrics, metrics_text
from limpet.client.api.problems import Problem, problem
from limpet.client.api.request_models import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from limpet.client.errors import LimpetError


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every status that is not 200."""

    error: ErrorObject


_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request can never work as it is."},
    401: {"model": ErrorBody, "description": "No valid key."},
    404: {"model": ErrorBody, "description": "No such model or session."},
    408: {"model": ErrorBody, "description": "timeout_ms passed, or the answer was cancelled."},
    409: {"model": ErrorBody, "description": "A turn of the session is running."},
    429: {"model": ErrorBody, "description": "The queue is full; Retry-After says when to come back."},
    503: {"model": ErrorBody, "description": "Not now: starting, stopping; Retry-After says when to come back."},
}


def create_app(address: str, keys: Sequence[str] = ()) -> FastAPI:
    """The application in front of the server at `address` (gRPC); with `keys` all but /health and /metrics need one."""
    gateway = Gateway(AsyncClient(address))
    counts = CollectorRegistry()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await gateway.client.close()

    app = FastAPI(title="Limpet", description="OpenAI's API in front of a Limpet server.", lifespan=lifespan)
    for router in (_answers(gateway), _models(gateway), _texts(gateway)):
        app.include_router(router, dependencies=[Depends(BearerKeys(keys))])
    app.include_router(_open(gateway, counts))
    app.add_middleware(ApiMetrics, registry=counts)
    _handle_errors(app)
    return app


def _answers(gateway: Gateway) -> APIRouter:
    router = APIRouter(prefix="/v1", responses=_REFUSALS)

    @router.post("/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a chat; with `stream` as server-sent events."""
        if body.stream:
            return await event_stream(request, stream_chat(gateway, body))
        return json_response(await unless_gone(request, answer_chat(gateway, body)))

    @router.post("/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue raw prompts; with `stream` as server-sent events."""
        if body.stream:
            return await event_stream(request, stream_completion(gateway, body))
        return json_response(await unless_gone(request, answer_completion(gateway, body)))

    return router


def _models(gateway: Gateway) -> APIRouter:
    router = APIRouter(prefix="/v1", responses=_REFUSALS)
    started = int(time.time())

    @router.get("/models")
    async def models() -> Response:
        """The models; `max_model_len` is the longest context in tokens."""
        summaries = await gateway.summaries()
        listed = [_model(name, started, summaries.get(name, {})) for name in await gateway.models()]
        return json_response({"object": "list", "data": listed})

    @router.get("/models/{model:path}")
    async def model(model: str) -> Response:
        """One model."""
        name = await gateway.model(model)
        return json_response(_model(name, started, (await gateway.summaries()).get(name, {})))

    return router


def _texts(gateway: Gateway) -> APIRouter:
    router = APIRouter(responses=_REFUSALS)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        """The ids of the prompt that a text, or messages, would be."""
        client = gateway.client.for_model(await gateway.model(body.model))
        messages = None if body.messages is None else [message.on_the_wire() for message in body.messages]
        ids = await client.tokenize(body.prompt, messages=messages)
        return json_response({"tokens": ids, "count": len(ids)})

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of ids."""
        client = gateway.client.for_model(await gateway.model(body.model))
        return json_response({"prompt": await client.detokenize(body.tokens)})

    return router


def _open(gateway: Gateway, counts: CollectorRegistry) -> APIRouter:
    router = APIRouter()

    @router.get("/health", responses={503: _REFUSALS[503]})
    async def health() -> Response:
        """200 if requests are answered now."""
        if (reason := await gateway.client.why_not_ready()) is not None:
            raise Problem(reason, 503, "server_error", "unavailable")
        return json_response({"status": "ok"})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text: the endpoint's counts, and those of the engines that answer."""
        return Response(metrics_text(counts, await gateway.metrics()), media_type=CONTENT_TYPE_LATEST)

    return router


def _model(name: str, created: int, summary: dict[str, Any]) -> dict[str, Any]:
    model = {"id": name, "object": "model", "created": created, "owned_by": "limpet"}
    return model | {"max_model_len": summary.get("session_len"), "vocab_size": summary.get("vocab_size")}


def _handle_errors(app: FastAPI) -> None:
    Handler = Callable[[Request, Any], Awaitable[Response]]

    def answering(to_problem: Callable[[Any], Problem]) -> Handler:
        async def handle(request: Request, error: Any) -> Response:
            refused = to_problem(error)
            return json_response(refused.body, refused.status, refused.headers)

        return handle

    app.add_exception_handler(Problem, answering(lambda error: error))
    app.add_exception_handler(LimpetError, answering(problem))
    app.add_exception_handler(RequestValidationError, answering(_invalid))
    app.add_exception_handler(HTTPException, answering(_of_http))
    app.add_exception_handler(ClientDisconnect, answering(lambda error: Problem("The client has gone.", 499)))
    app.add_exception_handler(
        Exception, answering(lambda error: Problem("The endpoint failed; its log says why.", 500, "server_error"))
    )


def _invalid(error: RequestValidationError) -> Problem:
    """What is wrong deepest inside the body: of a value's possible types that is the one that was meant."""
    first = max(error.errors(), key=lambda each: len(each["loc"]))
    place = [part for part in map(str, first["loc"][1:]) if part != "str" and "[" not in part]
    if first["type"] == "json_invalid":
        return Problem(f"The body is no valid JSON: {first['ctx']['error']}.")
    if not place:
        return Problem("The body must be a JSON object, sent with Content-Type: application/json.")
    if first["type"] == "extra_forbidden":
        return Problem(f"Unknown parameter {'.'.join(place)!r}.", param=place[0])
    return Problem(f"{'.'.join(place)}: {first['msg']}.", param=place[0])


def _of_http(error: HTTPException) -> Problem:
    return Problem(str(error.detail), error.status_code)
