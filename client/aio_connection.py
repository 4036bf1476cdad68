"""The asyncio client's connection to one server."""

import weakref
from collections.abc import AsyncIterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from limpet.client.aio_call import AsyncCall
from limpet.client.endpoint import CHANNEL_OPTIONS, PROBE_TIMEOUT_S, check_address
from limpet.client.errors import Cancelled, LimpetError, error_from_rpc


class AsyncConnection:
    """One channel, made on the event loop of the first request; raises only LimpetErrors."""

    def __init__(self, address: str) -> None:
        self.address = check_address(address)
        self._channel: Any = None
        self._calls: weakref.WeakSet[AsyncCall] = weakref.WeakSet()
        self._closed = False

    def stream(self, request: pb.ModelInferRequest, timeout_s: float | None) -> AsyncCall:
        """Send one request on a stream of its own, since Triton cancels whole streams."""
        rpc = self._service().ModelStreamInfer(_only(request), timeout=timeout_s)
        call = AsyncCall(rpc, self.address, self._answers)
        self._calls.add(call)
        return call

    async def ask(self, method: str, request: Any, timeout_s: float) -> Any:
        """One question with one answer; `method` is its name in Triton's service."""
        try:
            return await getattr(self._service(), method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.address) from None

    async def close(self) -> None:
        """Cancel everything that runs and close the channel."""
        self._closed = True
        for call in list(self._calls):
            call.cancel()
        if self._channel is not None:
            await self._channel.close()

    def _service(self) -> Any:
        if self._closed:
            raise Cancelled("This client is closed.")
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        return service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def _answers(self) -> bool:
        try:
            await self.ask("ServerLive", pb.ServerLiveRequest(), PROBE_TIMEOUT_S)
        except LimpetError:
            return False
        return True


async def _only(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelInferRequest]:
    yield request
