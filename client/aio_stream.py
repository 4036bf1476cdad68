"""A streamed answer of the asyncio client."""

from types import TracebackType

from limpet.client.aio_call import AsyncCall
from limpet.client.aio_connection import AsyncConnection
from limpet.client.errors import ConnectionLost, LimpetError
from limpet.client.exchange import Exchange
from limpet.client.results import Chunk, Generation


class AsyncStream:
    """An asynchronous iterator of Chunks; closing it, or dropping it before its end, cancels the request.

    Iterating raises a LimpetError if the answer fails: Cancelled if another task closes the stream or the client.
    """

    def __init__(self, connection: AsyncConnection, exchange: Exchange, timeout_s: float | None) -> None:
        self._connection = connection
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._call: AsyncCall | None = connection.stream(exchange.request, timeout_s)

    @property
    def request_id(self) -> str:
        """What `AsyncClient.cancel(request_id=...)` takes."""
        return str(self._exchange.request.id)

    @property
    def result(self) -> Generation:
        """The whole answer once the iteration has ended; before, what has arrived so far."""
        return self._exchange.result()

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> Chunk:
        while self._call is not None:
            try:
                return await self._receive(self._call)
            except LimpetError as error:
                self._call = None
                if not self._exchange.failed(error):
                    raise
                self._call = self._connection.stream(self._exchange.request, self._timeout_s)
        raise StopAsyncIteration

    async def read(self) -> Generation:
        """Wait for the rest of the answer and return all of it."""
        async for _ in self:
            pass
        return self.result

    def close(self) -> None:
        """Stop the answer; the session keeps what had arrived. Does nothing after the end."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
            self._exchange.closed()

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_call", None) is not None:
            self.close()

    async def _receive(self, call: AsyncCall) -> Chunk:
        response = await call.read()
        if response is None:
            raise ConnectionLost("The server closed the stream before the answer was complete.")
        try:
            chunk = self._exchange.accept(response)
        except LimpetError:
            await call.drain()
            raise
        if self._exchange.complete:
            self._call = None
            await call.drain()
        return chunk


async def start(
    connection: AsyncConnection, exchange: Exchange, timeout_s: float | None, stream: bool
) -> Generation | AsyncStream:
    """Send the request; the stream of its answer, or without `stream` the whole answer."""
    answer = AsyncStream(connection, exchange, timeout_s)
    if stream:
        return answer
    async with answer:
        return await answer.read()
