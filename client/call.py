"""One blocking streaming RPC, and the watch over those that have fallen silent."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb

from limpet.client.endpoint import PROBE_AFTER_S
from limpet.client.errors import ConnectionLost, LimpetError, error_from_rpc

_CHECK_EVERY_S = 1.0


class Call:
    """An iterator of one request's responses that raises only LimpetErrors."""

    def __init__(self, rpc: Any, address: str) -> None:
        self._rpc = rpc
        self._address = address
        self._lost = False
        self.heard_at = time.monotonic()  # when the server last gave a sign of life

    def __iter__(self) -> Iterator[pb.ModelStreamInferResponse]:
        return self

    def __next__(self) -> pb.ModelStreamInferResponse:
        try:
            response = next(self._rpc)
        except grpc.RpcError as error:
            if self._lost:
                raise ConnectionLost(f"{self._address} has stopped answering.") from None
            raise error_from_rpc(error, self._address) from None
        self.heard_at = time.monotonic()
        return response

    @property
    def running(self) -> bool:
        return bool(self._rpc.is_active())

    def drain(self) -> None:
        """Read to the RPC's natural end: one broken off exactly at its last response is never released by Triton."""
        try:
            for _ in self:
                pass
        except LimpetError:
            return  # all that matters has arrived

    def cancel(self) -> None:
        """End the RPC; whoever waits for its next response gets Cancelled."""
        self._rpc.cancel()

    def lose(self) -> None:
        """End the RPC since the server does not answer any more; whoever waits gets ConnectionLost."""
        self._lost = True
        self._rpc.cancel()


class SilenceWatch:
    """Notices a server that vanished without closing the connection: asks it when a call has been silent.

    gRPC's keepalive cannot do this: tritonserver takes more than a ping every five minutes for an attack and closes
    the connection. `answers` asks the server and must return in bounded time.
    """

    def __init__(self, answers: Callable[[], bool]) -> None:
        self._answers = answers
        self._calls: list[Call] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def add(self, call: Call) -> None:
        """Watch a call until it ends."""
        with self._lock:
            self._calls.append(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="limpet-silence-watch", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while calls := self._running():
            horizon = time.monotonic() - PROBE_AFTER_S
            silent = [call for call in calls if call.heard_at < horizon]
            if silent:
                self._ask_about(silent)
            self._stopped.wait(_CHECK_EVERY_S)

    def _running(self) -> list[Call]:
        with self._lock:
            self._calls = [call for call in self._calls if call.running]
            if not self._calls or self._stopped.is_set():
                self._thread = None
                return []
            return list(self._calls)

    def _ask_about(self, silent: list[Call]) -> None:
        if self._answers():
            now = time.monotonic()
            for call in silent:
                call.heard_at = now
        else:
            for call in silent:
                call.lose()
