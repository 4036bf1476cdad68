"""limpet_admin's links to the engines: one each, kept as long as limpet_admin lives, so that engines notice its end."""

import queue
import threading
import time
from collections.abc import Mapping

from limpet.backend.link.connection import EngineConnection, EngineUnavailableError, RequestEvent
from limpet.backend.link.keeper import EngineStartError, EngineWatcher
from limpet.backend.link.messages import Admin, AdminReply, Failed, Hello
from limpet.backend.link.ownership import EngineRuntime


class _Call:
    """One operation on one engine."""

    def __init__(self, connection: EngineConnection, op: str, arguments: str) -> None:
        """Raises EngineUnavailableError."""
        self._connection = connection
        self._answers: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        self._key = connection.open(self)
        connection.send(Admin(key=self._key, op=op, arguments=arguments))

    def deliver(self, event: RequestEvent) -> None:
        self._answers.put(event)

    def answer(self, timeout_s: float) -> AdminReply | Failed:
        """Raises queue.Empty if none comes in time."""
        try:
            event = self._answers.get(timeout=max(0.0, timeout_s))
        finally:
            self._connection.close(self._key)
        assert isinstance(event, AdminReply | Failed), event
        return event


class AdminLinks:
    """Asks engines by their models' names; from any thread. It never starts an engine."""

    def __init__(self, hello: Hello) -> None:
        self._hello = hello
        self._connections: dict[str, EngineConnection] = {}
        self._lock = threading.Lock()

    def connect(self, engines: Mapping[str, EngineRuntime]) -> None:
        """Begin to watch for engines that are not watched yet."""
        with self._lock:
            for name, runtime in engines.items():
                if name not in self._connections:
                    self._connections[name] = EngineConnection(runtime, EngineWatcher(runtime), self._hello)
                    self._connections[name].start()

    def call(
        self, engines: Mapping[str, EngineRuntime], op: str, arguments: str, timeout_s: float
    ) -> dict[str, AdminReply | Failed]:
        """Ask all at once; an engine that is not there or does not answer in time is Failed with UNAVAILABLE."""
        self.connect(engines)
        deadline = time.monotonic() + timeout_s
        calls: dict[str, _Call] = {}
        answers: dict[str, AdminReply | Failed] = {}
        for name, runtime in engines.items():
            try:
                calls[name] = self._begin(name, runtime, op, arguments, deadline - time.monotonic())
            except EngineUnavailableError as error:
                answers[name] = _unavailable(str(error))
        for name, call in calls.items():
            try:
                answers[name] = call.answer(deadline - time.monotonic())
            except queue.Empty:
                answers[name] = _unavailable(f"The engine of {name} did not answer within {timeout_s:g} s.")
        return {name: answers[name] for name in engines}

    def stop(self) -> None:
        """Leave all engines."""
        for connection in self._connections.values():
            connection.stop()

    def _begin(self, name: str, runtime: EngineRuntime, op: str, arguments: str, timeout_s: float) -> _Call:
        if not runtime.is_locked():
            raise EngineUnavailableError(f"The engine of {name} is not running.")
        try:
            self._connections[name].wait_ready(timeout_s)
        except EngineStartError:
            raise EngineUnavailableError(f"The engine of {name} is still starting.") from None
        return _Call(self._connections[name], op, arguments)


def _unavailable(message: str) -> Failed:
    return Failed(key=0, code="UNAVAILABLE", message=message)
