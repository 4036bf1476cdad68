"""The link across the lives of engines: started, found, lost, hung, restarted."""

import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from limpet.backend.link import connection as link
from limpet.backend.link import keeper as keeping
from limpet.backend.link.connection import EngineConnection, EngineUnavailableError, RequestEvent
from limpet.backend.link.keeper import EngineKeeper, EngineStartError
from limpet.backend.link.messages import Bye, Failed, Hello, ModelInfo, Settle, TokenOutput
from limpet.backend.link.ownership import EXIT_NOT_OWNER, EngineRuntime
from tests.front_end.fake_engine import WAIT_S, FakeEngine

ROOT = Path(__file__).parents[2]
DIGEST = "digest"
INFO = ModelInfo(engine_pid=0, session_len=64, vocab_size=100, max_batch_size=1, eos_token_ids=[])
Spawn = Callable[[], "subprocess.Popen[bytes]"]


class Inbox:
    """A request that notes what it is told."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()

    def deliver(self, event: RequestEvent) -> None:
        self.events.put(event)

    def next(self) -> RequestEvent:
        return self.events.get(timeout=WAIT_S)


@pytest.fixture
def spawned() -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Engine processes of the test; those that live are ended after it."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def spawn(runtime: EngineRuntime, spawned: list["subprocess.Popen[bytes]"]) -> Spawn:
    def start() -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "tests.front_end.fake_engine", str(runtime.folder), DIGEST]
        spawned.append(subprocess.Popen(command, cwd=ROOT))
        return spawned[-1]

    return start


def exits_with(code: int) -> Spawn:
    return lambda: subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])


def connection_of(runtime: EngineRuntime, spawn: Spawn) -> EngineConnection:
    hello = Hello("test", os.getpid(), "front_end")
    return EngineConnection(runtime, EngineKeeper(runtime, DIGEST, spawn), hello)


@contextmanager
def connected(runtime: EngineRuntime, spawn: Spawn) -> Iterator[EngineConnection]:
    connection = connection_of(runtime, spawn)
    connection.start()
    try:
        connection.wait_ready()
        yield connection
    finally:
        connection.stop()


def opened_again(connection: EngineConnection, receiver: Inbox) -> int:
    """A key of the next engine, as soon as it is there."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return connection.open(receiver)
        except EngineUnavailableError:
            assert time.monotonic() < deadline, "no new engine"
            time.sleep(0.02)


def test_an_engine_is_started_and_left_in_peace(runtime: EngineRuntime, spawn: Spawn) -> None:
    with connected(runtime, spawn) as connection:
        state = runtime.state()
        assert state is not None
        assert connection.info.engine_pid == state.pid
    assert runtime.is_locked()  # it leaves by itself, when its last front end has gone


def test_no_engine_is_started_for_a_server_that_has_ended(
    runtime: EngineRuntime, spawn: Spawn, spawned: list["subprocess.Popen[bytes]"]
) -> None:
    with subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE) as server:
        of_server = EngineRuntime.for_model(runtime.folder, server.pid)
    keeper = EngineKeeper(of_server, DIGEST, spawn)
    assert keeper.find() is None
    assert not spawned


def test_two_front_ends_share_one_engine(
    runtime: EngineRuntime, spawn: Spawn, spawned: list["subprocess.Popen[bytes]"]
) -> None:
    first, second = connection_of(runtime, spawn), connection_of(runtime, spawn)
    for connection in (first, second):
        connection.start()
    assert first.wait_ready().engine_pid == second.wait_ready().engine_pid
    first.stop()
    second.stop()
    losers = [process for process in spawned if process.pid != (runtime.state() or pytest.fail("gone")).pid]
    assert all(process.wait(WAIT_S) == EXIT_NOT_OWNER for process in losers)


def test_a_start_that_fails_says_the_exit_code(runtime: EngineRuntime) -> None:
    connection = connection_of(runtime, exits_with(3))
    connection.start()
    with pytest.raises(EngineStartError, match="exit code 3"):
        connection.wait_ready()
    connection.stop()
    assert not runtime.folder.exists()


def test_an_engine_that_comes_second_is_no_failure(runtime: EngineRuntime, spawn: Spawn) -> None:
    starts = iter([exits_with(EXIT_NOT_OWNER), spawn])
    with connected(runtime, lambda: next(starts)()) as connection:
        assert connection.info.session_len == 64


def test_an_engine_with_other_settings_is_waited_for_and_then_refused(
    runtime: EngineRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "_OTHER_ENGINE_PATIENCE_S", 0.1)
    assert runtime.take_lock("other settings")
    connection = connection_of(runtime, lambda: pytest.fail("two engines in memory"))
    connection.start()
    with pytest.raises(EngineStartError, match="other settings is still running"):
        connection.wait_ready()
    connection.stop()


def test_a_dead_engine_fails_its_requests_at_once_and_is_replaced(
    runtime: EngineRuntime, spawn: Spawn, spawned: list["subprocess.Popen[bytes]"]
) -> None:
    with connected(runtime, spawn) as connection:
        inbox = Inbox()
        key = connection.open(inbox)
        first = connection.info.engine_pid
        spawned[0].kill()
        failed = inbox.next()
        assert isinstance(failed, Failed)
        assert (failed.key, failed.code) == (key, "UNAVAILABLE")
        assert "The engine stopped; it is being restarted" in failed.message
        connection.send(Settle(key, 0))  # silent: the key went with its engine
        assert opened_again(connection, Inbox()) > key
        assert connection.info.engine_pid != first
    spawned[-1].kill()


def test_requests_are_refused_while_there_is_no_engine(
    runtime: EngineRuntime, spawn: Spawn, spawned: list["subprocess.Popen[bytes]"]
) -> None:
    starts = iter([spawn])
    with connected(runtime, lambda: next(starts, exits_with(1))()) as connection:
        inbox = Inbox()
        connection.open(inbox)
        spawned[0].kill()
        inbox.next()
        with pytest.raises(EngineUnavailableError, match="it is being restarted"):
            connection.open(Inbox())


def test_an_engine_that_hangs_is_killed_and_replaced(
    runtime: EngineRuntime,
    spawn: Spawn,
    spawned: list["subprocess.Popen[bytes]"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "LOST_AFTER_S", 1.0)
    monkeypatch.setattr(link, "HUNG_AFTER_S", 2.0)
    with connected(runtime, spawn) as connection:
        inbox = Inbox()
        connection.open(inbox)
        psutil.Process(connection.info.engine_pid).suspend()
        failed = inbox.next()
        assert isinstance(failed, Failed)
        assert "silent for 1 s" in failed.message
        assert spawned[0].wait(WAIT_S) == -9
        opened_again(connection, Inbox())


def test_an_engine_that_speaks_again_is_kept(runtime: EngineRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "LOST_AFTER_S", 1.0)
    engine = FakeEngine(runtime, DIGEST, INFO)
    engine.start()
    with connected(runtime, lambda: pytest.fail("the engine lives")) as connection:
        inbox = Inbox()
        connection.open(inbox)
        engine.is_silent = True
        assert isinstance(inbox.next(), Failed)
        engine.is_silent = False
        opened_again(connection, Inbox())
        assert len(engine.hellos) == 2
    engine.expect(Bye)
    engine.stop()


def test_answers_reach_only_their_own_open_key(runtime: EngineRuntime) -> None:
    engine = FakeEngine(runtime, DIGEST, INFO)
    engine.start()
    with connected(runtime, lambda: pytest.fail("the engine lives")) as connection:
        first, second, closed = Inbox(), Inbox(), Inbox()
        keys = [connection.open(inbox) for inbox in (first, second, closed)]
        connection.close(keys[2])
        engine.send(link.Outputs([TokenOutput(key, [key]) for key in keys]))
        assert [inbox.next().key for inbox in (first, second)] == keys[:2]
        assert closed.events.empty()
    engine.expect(Bye)
    engine.stop()
