"""What stands before Gradio's own application: security headers, and the message of a tab that closes."""

from collections.abc import Awaitable, Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Gradio's page needs inline scripts and styles, and evaluates its handlers' code. Nothing comes from elsewhere.
_POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'self'; form-action 'self'; "
    "base-uri 'self'; object-src 'none'"
)
_LEAVE = "/limpet/leave/"


class SecurityHeaders:
    """Keeps the browser on this machine, whatever a model writes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = _POLICY
                headers["Referrer-Policy"] = "no-referrer"
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)

        await self._app(scope, receive, send_with_headers)


class LeaveRoute:
    """Tells `leave` the hash of a tab whose page sends POST .../limpet/leave/HASH: it is being closed."""

    def __init__(self, app: ASGIApp, leave: Callable[[str], Awaitable[None]]) -> None:
        self._app = app
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        hash = scope.get("path", "").partition(_LEAVE)[2]
        if scope["type"] != "http" or scope["method"] != "POST" or not hash:
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})
        await self._leave(hash)
