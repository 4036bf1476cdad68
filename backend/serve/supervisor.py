"""The life of one server: start, ready, watch, drain, stop, clean up."""

import selectors
import socket
import sys
import time

from limpet.backend.serve.admin import Admin, AdminError
from limpet.backend.serve.errors import ServeError
from limpet.backend.serve.installation import find_installation
from limpet.backend.serve.options import Options
from limpet.backend.serve.preflight import check
from limpet.backend.serve.process_tree import ProcessTree
from limpet.backend.serve.repository import admin_keys
from limpet.backend.serve.runtime_folder import RuntimeFolder
from limpet.backend.serve.stop_signals import StopSignals
from limpet.backend.serve.summary import summary

_PROBE_EVERY_S = 0.25
_LOOK_EVERY_S = 1.0
_CONNECT_S = 1.0
_TERM_GRACE_S = 10.0  # an idle tritonserver needs 2 s; a client's stream can hold it for ever
_ORPHAN_GRACE_S = 8.0  # stubs notice the end of tritonserver within 5 s


def serve(options: Options) -> int:
    """Run a server until it is told to stop; returns 0, raises ServeError with the cause if it fails."""
    check(options)
    with StopSignals() as signals:
        folder = RuntimeFolder()
        try:
            return _run(options, folder, signals)
        finally:
            folder.remove()


def _run(options: Options, folder: RuntimeFolder, signals: StopSignals) -> int:
    installation = find_installation(folder.path)
    environment = {**installation.environment, "LIMPET_RUNTIME_DIR": str(folder.path)}
    flags = [
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name={folder.shm_prefix}",
        f"--exit-timeout-secs={_TERM_GRACE_S:.0f}",
        *options.tritonserver_flags(),
    ]
    admin = Admin(options.grpc.target, admin_keys(options.model_repositories))
    tree = ProcessTree(installation.command(flags), environment)
    try:
        Supervisor(tree, admin, folder, signals).run(options)
    finally:
        for name in tree.end(_ORPHAN_GRACE_S):
            _say(f"{name} did not end by itself and was killed.")
    return 0


class Supervisor:
    """Watches a started server; every wait ends early for a signal, a death or a deadline."""

    def __init__(self, tree: ProcessTree, admin: Admin, folder: RuntimeFolder, signals: StopSignals) -> None:
        self._tree = tree
        self._admin = admin
        self._folder = folder
        self._signals = signals
        self._next_look = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(tree.pidfd, selectors.EVENT_READ)
        self._selector.register(signals.fd, selectors.EVENT_READ)

    def run(self, options: Options) -> None:
        """Until a clean stop; raises ServeError if the server fails first."""
        started = time.monotonic()
        if self._wait_ready(options):
            print(summary(options, self._admin.models(), time.monotonic() - started), flush=True)
            while not self._pause(_PROBE_EVERY_S):
                pass
            if not self._drain(options.drain_deadline_s):
                return  # tritonserver would wait for the requests that still run: it is killed with them
        if not self._tree.terminate(_TERM_GRACE_S):
            _say(
                f"tritonserver did not end within {_TERM_GRACE_S:.0f} s and was killed: "
                "streams that clients left open, or broke off, can hold it."
            )

    def _wait_ready(self, options: Options) -> bool:
        """False if a signal came first; raises ServeError past the deadline."""
        deadline = time.monotonic() + options.ready_deadline_s
        while (reason := self._admin.why_not_ready() or _closed_port(options)) is not None:
            if time.monotonic() > deadline:
                raise ServeError(f"The server was not ready within {options.ready_deadline_s:g} s: {reason}")
            if self._pause(_PROBE_EVERY_S):
                return False
        return True

    def _drain(self, deadline_s: float) -> bool:
        """Let running requests finish, new ones are refused; False if a second signal or the deadline came first."""
        seen = self._signals.received
        deadline = time.monotonic() + deadline_s
        try:
            running = self._admin.drain()
            _say(f"stopping; {running} running requests have {deadline_s:g} s to finish (again to stop at once).")
            while running and time.monotonic() < deadline and self._signals.received == seen:
                self._pause(_PROBE_EVERY_S)
                running = self._admin.drain()
        except AdminError as error:
            _say(f"stopping without waiting for running requests: {error}")
            return True
        if running:
            _say(f"{running} requests did not finish: ended.")
        return running == 0

    def _pause(self, seconds: float) -> bool:
        """Wait for the next event; True once a stop was asked for, ServeError with the cause if a process died."""
        self._selector.select(seconds)
        self._signals.clear()
        self._tree.reap_orphans()
        if (code := self._tree.exit_code()) is not None:
            raise ServeError(f"tritonserver {_how_it_ended(code)}; its own messages above say more.")
        if (cause := self._folder.front_end_death() or self._stub_death()) is not None:
            raise ServeError(f"{cause} Its clients would wait for ever, so the server ends.")
        return self._signals.received > 0

    def _stub_death(self) -> str | None:
        """What no engine told: it may be dead too, or never have known the process."""
        if time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + _LOOK_EVERY_S
        model = self._tree.dead_stub()
        return None if model is None else f"The Python backend process of {model} died."


def _closed_port(options: Options) -> str | None:
    """tritonserver opens its ports one after the other, gRPC's first."""
    for endpoint in options.endpoints:
        try:
            socket.create_connection((endpoint.host, endpoint.port), _CONNECT_S).close()
        except OSError as error:
            return f"port {endpoint.port} for {endpoint.protocol} takes no connection ({error.strerror or error})."
    return None


def _how_it_ended(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _say(sentence: str) -> None:
    print(f"limpet-serve: {sentence}", file=sys.stderr, flush=True)
