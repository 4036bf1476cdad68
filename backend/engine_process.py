"""The engine's process: `python -m limpet.backend.engine_process`, started by a front end, parameters (JSON) on stdin.

Holds the ownership lock, loads the model, serves the link, and leaves when tritonserver ends or when its last front end
has been gone for a grace time. As the last one alive it removes what the others left: the stubs' shared-memory regions,
its socket and folder.
"""

import argparse
import contextlib
import gc
import logging
import os
import select
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
import psutil

from limpet.backend.admin_ops import AdminOps
from limpet.backend.build import build_engine
from limpet.backend.checkpoint import CheckpointDir, CheckpointError
from limpet.backend.config import ConfigError, EngineConfig, parse_parameters
from limpet.backend.core import RequestError
from limpet.backend.link.messages import Admin, AdminReply, Failed, Hello, ModelInfo, Welcome
from limpet.backend.link.ownership import EXIT_NOT_OWNER, EngineRuntime, engines_under, runtime_root, settings_digest
from limpet.backend.link.router import Arrived, Connection, Lost, Router
from limpet.backend.log import start_log
from limpet.backend.ranks.follower_processes import RankError
from limpet.backend.ranks.rank_loss import RankLoss
from limpet.backend.service import EngineService, Parked
from limpet.backend.session_store import SessionStore, StoreError
from limpet.backend.sessions import SessionBusyError, SessionTable

logger = logging.getLogger("limpet.engine")

GRACE_S = 10.0  # without a front end for so long: leave
RANK_LOSS_KNOWN_S = 1.0
STUBS_END_WITHIN_S = 6.0  # stubs notice the end of tritonserver within 5 s


class EngineProcess:
    """Event loop around one engine: messages while steps run, steps while messages are awaited."""

    def __init__(self, runtime: EngineRuntime, model_dir: Path, config: EngineConfig, server_pidfd: int) -> None:
        self._rank_loss = RankLoss()
        self.store = _open_store(model_dir, config)  # a wrong file is told before the weights are loaded
        sessions = SessionTable(
            idle_timeout_s=config.session_idle_timeout_s, max_sessions=config.max_sessions, store=self.store
        )
        engine, self.summary = build_engine(model_dir, config, self._rank_loss.happen)
        model = CheckpointDir(model_dir).model_config()
        self.engine = engine
        self.router = Router(runtime.address)
        self._rank_loss.wake = self.router.wake
        if self.store is not None:
            self.store.on_commit = self.router.wake
        self.service = EngineService(engine, sessions, frozenset(model.eos_token_ids), self.router.send)
        self._admin = AdminOps(self.service, config, self.summary)
        self._info = ModelInfo(
            engine_pid=os.getpid(),
            session_len=engine.session_len,
            vocab_size=engine.vocab_size,
            max_batch_size=config.max_batch_size,
            eos_token_ids=list(model.eos_token_ids),
        )
        self._server_pidfd = server_pidfd
        self.router.watch(server_pidfd)
        if engine.guides is not None:
            engine.guides.on_compiled = self.router.wake
        self._left_alone_since: float | None = time.monotonic()
        self._stopping = False
        self._stubs: dict[int, psutil.Process] = {}
        self.shm_regions: set[str] = set()

    def end_stubs(self) -> None:
        """Wait until the stubs have ended, as they do by themselves after tritonserver, and kill those that have not.

        A stub that was sending when tritonserver was killed may wait for ever for a lock in their shared memory.
        """
        _, hanging = psutil.wait_procs(self._stubs.values(), timeout=STUBS_END_WITHIN_S)
        for stub in hanging:
            with contextlib.suppress(psutil.NoSuchProcess):
                stub.kill()

    def stop(self) -> None:
        self._stopping = True
        self.router.wake()

    def serve(self) -> None:
        """Serve until there is nobody left to serve, then close; raises RankError if a rank is lost."""
        try:
            self.run()
            self.close()
        except RuntimeError:  # of a collective, which fails before the end of its rank is noticed
            self._rank_loss.check(RANK_LOSS_KNOWN_S)
            raise

    def run(self) -> None:
        while not self._should_leave():
            self._rank_loss.check()
            if self.engine.num_in_flight < 2:
                self.engine.launch(self.router.wake)
            for event in self.router.poll(timeout_s=GRACE_S):
                self._handle(event)
            while self.engine.is_ready():
                self.service.deliver(self.engine.collect())
                self.service.metrics.step_time.observe(self.engine.last_step_s)
            self.service.expire()
            if self.store is not None:
                self.store.run_callbacks()
            self._admin.note_progress()

    def close(self) -> None:
        self.engine.close()  # its last step still wakes the router
        if self.store is not None:
            self.store.close()
        self.router.close()

    def _should_leave(self) -> bool:
        if self._stopping or _has_ended(self._server_pidfd):
            return True
        return self._left_alone_since is not None and time.monotonic() - self._left_alone_since > GRACE_S

    def _handle(self, event: Arrived | Lost) -> None:
        match event:
            case Lost(connection, died):
                self._lose(connection, died)
            case Arrived(connection, Hello() as hello):
                self._welcome(connection, hello)
            case Arrived(connection, Admin() as message):
                self._run_admin(connection, message)
            case Arrived(connection, message):
                self.service.handle(connection, message)

    def _welcome(self, connection: Connection, hello: Hello) -> None:
        self._note_stub(hello.pid)
        if hello.shm_region is not None:
            self.shm_regions.add(hello.shm_region)
        self._note_front_ends()
        self.router.send(connection, Welcome(self._info))

    def _note_stub(self, pid: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)  # knows when it started: its number cannot be taken for another process
            if any(part.endswith("triton_python_backend_stub") for part in process.cmdline()[:1]):
                self._stubs[pid] = process

    def _run_admin(self, connection: Connection, message: Admin) -> None:
        try:
            self.router.send(connection, AdminReply(message.key, self._admin.run(message.op, message.arguments)))
        except SessionBusyError as error:
            retry = partial(self._run_admin, connection, message)
            refuse = partial(self.router.send, connection, Failed(message.key, error.code, str(error)))
            self.service.park(error.session_id, Parked(connection, retry, refuse))
        except RequestError as error:
            self.router.send(connection, Failed(message.key, error.code, str(error)))

    def _lose(self, connection: Connection, died: bool) -> None:
        self.service.lose(connection)
        self._note_front_ends()
        if died and not _has_ended(self._server_pidfd):
            _report_death(connection)

    def _note_front_ends(self) -> None:
        alone = not any(connection.hello.role == "front_end" for connection in self.router.connections)
        if not alone:
            self._left_alone_since = None
        elif self._left_alone_since is None:
            self._left_alone_since = time.monotonic()


def _open_store(model_dir: Path, config: EngineConfig) -> SessionStore | None:
    """Raises StoreError."""
    if not config.session_store:
        return None
    tokenizer = CheckpointDir(model_dir).manifest().files["tokenizer.json"].sha256
    return SessionStore(model_dir / config.session_store, tokenizer)


def _report_death(connection: Connection) -> None:
    """Tell limpet-serve: Triton neither restarts a dead stub nor ends its streams."""
    cause = f"The {connection.hello.role} process {connection.hello.pid} died without leaving: its streams hang."
    logger.error(cause)
    if "LIMPET_RUNTIME_DIR" in os.environ:
        (runtime_root() / "front-end-died").write_text(cause + "\n", "utf-8")


def _has_ended(pidfd: int) -> bool:
    """A pidfd is readable once its process has ended."""
    return bool(select.select([pidfd], [], [], 0)[0])


def _remove_leftovers(runtime: EngineRuntime, process: EngineProcess | None, server_pidfd: int) -> None:
    """Remove what nobody else is alive to remove."""
    runtime.remove()
    if not _has_ended(server_pidfd):
        return
    if process is not None:
        process.end_stubs()
        for region in process.shm_regions:
            (Path("/dev/shm") / Path(region).name).unlink(missing_ok=True)
    root = runtime_root()
    if "LIMPET_RUNTIME_DIR" in os.environ and not any(engine.is_locked() for engine in engines_under(root)):
        shutil.rmtree(root, ignore_errors=True)  # limpet-serve made it for this server, and may be dead too


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="limpet.backend.engine_process", description=__doc__)
    parser.add_argument("--runtime", type=Path, required=True, help="this engine's runtime folder")
    parser.add_argument("--model", type=Path, required=True, help="the converted model's folder")
    parser.add_argument("--server-pid", type=int, required=True, help="tritonserver's process id")
    return parser.parse_args()


def _serve(runtime: EngineRuntime, model_dir: Path, parameters: dict[str, str], server_pidfd: int) -> None:
    process: EngineProcess | None = None
    try:
        process = EngineProcess(runtime, model_dir, parse_parameters(parameters), server_pidfd)
        gc.collect()
        gc.freeze()  # what was loaded stays: no later collection halts the steps to look through it
        signal.signal(signal.SIGTERM, lambda *_: process.stop())
        for line in process.summary.lines():
            logger.info("%s: %s", model_dir.name, line)
        process.serve()
    finally:
        _remove_leftovers(runtime, process, server_pidfd)


def main() -> int:
    """Exit code 0 after a clean end, EXIT_NOT_OWNER if another engine was quicker, 1 for a model that cannot load."""
    arguments = _arguments()
    start_log("limpet-engine")
    # Not an argument: the admin_key among them would be in every user's process list.
    parameters = msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, str])
    runtime = EngineRuntime(arguments.runtime)
    if not runtime.take_lock(settings_digest(parameters)):
        return EXIT_NOT_OWNER
    try:
        _serve(runtime, arguments.model, parameters, os.pidfd_open(arguments.server_pid))
    except (ConfigError, CheckpointError, StoreError, ProcessLookupError) as error:
        logger.error("%s cannot be served: %s", arguments.model.name, error)
        return 1
    except RankError as error:
        logger.error("%s is not served any more: %s", arguments.model.name, error)
        os._exit(1)  # threads may hang in a collective
    return 0


if __name__ == "__main__":
    sys.exit(main())
