"""gRPC client library for Limpet: `Client` blocks, `AsyncClient` is for asyncio; both are otherwise the same."""

from limpet.client.aio_client import AsyncClient
from limpet.client.aio_session import AsyncSession
from limpet.client.aio_stream import AsyncStream
from limpet.client.client import Client
from limpet.client.conversation import SessionState
from limpet.client.errors import (
    Cancelled,
    ConnectionLost,
    InvalidRequest,
    LimpetError,
    NotFound,
    QueueFull,
    RequestTimeout,
    ServerError,
    SessionBusy,
    SessionNotFound,
    Unavailable,
)
from limpet.client.options import Messages, Options
from limpet.client.results import Chunk, Generation
from limpet.client.session import Session
from limpet.client.stream import Stream

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "AsyncStream",
    "Cancelled",
    "Chunk",
    "Client",
    "ConnectionLost",
    "Generation",
    "InvalidRequest",
    "LimpetError",
    "Messages",
    "NotFound",
    "Options",
    "QueueFull",
    "RequestTimeout",
    "ServerError",
    "Session",
    "SessionBusy",
    "SessionNotFound",
    "SessionState",
    "Stream",
    "Unavailable",
]
