"""One streaming RPC of the asyncio client."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb

from limpet.client.endpoint import PROBE_AFTER_S
from limpet.client.errors import Cancelled, ConnectionLost, LimpetError, error_from_rpc


class AsyncCall:
    """One request's responses. A server that vanished without closing the connection is noticed as by SilenceWatch."""

    def __init__(self, rpc: Any, address: str, answers: Callable[[], Awaitable[bool]]) -> None:
        self._rpc = rpc
        self._address = address
        self._answers = answers
        self._ended_by: LimpetError | None = None
        self._heard_at = time.monotonic()
        self._loop = asyncio.get_running_loop()
        watch = self._loop.create_task(self._watch_silence())
        rpc.add_done_callback(lambda _: watch.cancel())

    async def read(self) -> pb.ModelStreamInferResponse | None:
        """The next response, None at the end."""
        try:
            response = await self._rpc.read()
        except grpc.RpcError as error:
            raise error_from_rpc(error, self._address) from None
        except asyncio.CancelledError:
            if self._ended_by is None:  # it is the caller's task that was cancelled
                raise
            raise self._ended_by from None
        self._heard_at = time.monotonic()
        return None if response is grpc.aio.EOF else response

    async def drain(self) -> None:
        """Read to the RPC's natural end: one broken off exactly at its last response is never released by Triton."""
        try:
            while await self.read() is not None:
                pass
        except LimpetError:
            return  # all that matters has arrived

    def cancel(self) -> None:
        """End the RPC; whoever waits for its next response gets Cancelled."""
        self._end(Cancelled("The request was cancelled."))

    def _end(self, error: LimpetError) -> None:
        if not self._loop.is_closed() and self._ended_by is None:
            self._ended_by = error
            self._rpc.cancel()

    async def _watch_silence(self) -> None:
        while True:
            silent_s = time.monotonic() - self._heard_at
            if silent_s < PROBE_AFTER_S:
                await asyncio.sleep(PROBE_AFTER_S - silent_s)
            elif await self._answers():
                self._heard_at = time.monotonic()
            else:
                self._end(ConnectionLost(f"{self._address} has stopped answering."))
                return
