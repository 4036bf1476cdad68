"""The blocking client's connection to one server."""

from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from limpet.client.call import Call, SilenceWatch
from limpet.client.endpoint import CHANNEL_OPTIONS, PROBE_TIMEOUT_S, check_address
from limpet.client.errors import Cancelled, LimpetError, error_from_rpc


class Connection:
    """One channel, usable from several threads; raises only LimpetErrors."""

    def __init__(self, address: str) -> None:
        self.address = check_address(address)
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._service = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._watch = SilenceWatch(self._answers)
        self._closed = False

    def stream(self, request: pb.ModelInferRequest, timeout_s: float | None) -> Call:
        """Send one request on a stream of its own, since Triton cancels whole streams."""
        self._check_open()
        call = Call(self._service.ModelStreamInfer(iter([request]), timeout=timeout_s), self.address)
        self._watch.add(call)
        return call

    def ask(self, method: str, request: Any, timeout_s: float) -> Any:
        """One question with one answer; `method` is its name in Triton's service."""
        self._check_open()
        try:
            return getattr(self._service, method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self.address) from None

    def close(self) -> None:
        """Cancel everything that runs and close the channel."""
        self._closed = True
        self._watch.stop()
        self._channel.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Cancelled("This client is closed.")

    def _answers(self) -> bool:
        try:
            self.ask("ServerLive", pb.ServerLiveRequest(), PROBE_TIMEOUT_S)
        except LimpetError:
            return False
        return True
