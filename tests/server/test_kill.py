"""Each process killed under load, and a stop under load: no request hangs, nothing is left."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.aids.chain import script
from tests.aids.live_server import LiveServer, kill, live_server
from tests.aids.wire import Wire, await_engine, text_of, wire

pytestmark = pytest.mark.server
NUM_STREAMS = 8
NUM_WHOLE = 2  # requests without streaming
NEXT_ANSWER_S = 5 * 15.0  # a request works again within 15 s of an engine's death: five times that, for busy machines
BROKEN_OFF_S = 5 * 2.0  # a running request gets its error within 2 s of an engine's death

ENGINE, STUB, TRITONSERVER = "limpet.backend.engine_process", "triton_python_backend_stub", "bin/tritonserver"


@contextmanager
def loaded_server(repository: Path, *flags: str) -> Iterator[tuple[LiveServer, list[Wire]]]:
    """A server with endless answers under way, NUM_STREAMS of them streamed."""
    with live_server(repository, flags) as server, ExitStack() as stack:
        server.wait_ready()
        clients = [stack.enter_context(wire(server.target, "chain")) for _ in range(NUM_WHOLE + NUM_STREAMS)]
        for number, client in enumerate(clients):
            client.send(text_input="loop", max_tokens=10_000_000, stream=number >= NUM_WHOLE)
        for client in clients[NUM_WHOLE:]:
            assert client.next().error is None
        await_engine(server.http, "chain", running=len(clients))
        yield server, clients


def _assert_all_end(clients: list[Wire], timeout_s: float) -> None:
    """Every request ends with an error within the time."""
    for client in clients:
        last = list(client.rest(timeout_s))[-1]
        assert last.error is not None


def test_killed_engine_fails_what_ran_and_a_new_one_answers(chain_repository: Path) -> None:
    with loaded_server(chain_repository) as (server, clients):
        kill([server.only(ENGINE)])
        _assert_all_end(clients, BROKEN_OFF_S)
        assert _answer_within(server, NEXT_ANSWER_S) == script("hello").text
        assert server.stop() == 0


def _answer_within(server: LiveServer, timeout_s: float) -> str:
    """Ask until a request is answered; while the engine starts each is refused at once as unavailable."""
    deadline = time.monotonic() + timeout_s
    while True:
        with wire(server.target, "chain") as client:
            responses = client.ask(text_input="hello", max_tokens=100, stream=True)
        if responses[-1].error is None:
            return text_of(responses)
        assert time.monotonic() < deadline, responses[-1].error


def test_session_of_a_killed_engine_is_not_found(chain_repository: Path) -> None:
    with live_server(chain_repository) as server:
        server.wait_ready()
        with wire(server.target, "chain") as client:
            text_of(client.ask(text_input="hello", stream=True, sequence_id="s", sequence_start=True))
            kill([server.only(ENGINE)])
            _answer_within(server, NEXT_ANSWER_S)
            lost = client.ask(text_input="hello", stream=True, sequence_id="s")
        assert "session not found" in (lost[-1].error or "").lower()
        assert server.stop() == 0


@pytest.mark.parametrize("model", ["chain", "limpet_admin"])
def test_killed_stub_ends_the_server_with_the_cause(chain_repository: Path, model: str) -> None:
    with loaded_server(chain_repository) as (server, clients):
        stubs = [stub for stub in server.processes(STUB) if f"/model_repository/{model}/" in " ".join(stub.cmdline())]
        assert len(stubs) == 1
        server.note_regions()
        kill(stubs)
        assert server.wait_end() == 1
        assert "died" in server.log()
        assert "Traceback" not in server.log()
        _assert_all_end(clients, BROKEN_OFF_S)


def test_killed_tritonserver_ends_everything(chain_repository: Path) -> None:
    with loaded_server(chain_repository) as (server, clients):
        server.note_regions()
        kill([server.only(TRITONSERVER)])
        _assert_all_end(clients, BROKEN_OFF_S)
        assert server.wait_end() == 1


def test_killed_limpet_serve_leaves_nothing(chain_repository: Path) -> None:
    with loaded_server(chain_repository) as (server, clients):
        server.note_regions()
        server.process.kill()
        _assert_all_end(clients, BROKEN_OFF_S)
        assert server.wait_end() == -signal.SIGKILL


def test_stub_that_hangs_in_a_dead_servers_lock_is_ended_too(chain_repository: Path) -> None:
    """As one may that was sending when tritonserver was killed; here it is stopped to be sure."""
    with live_server(chain_repository) as server:
        server.wait_ready()
        server.note_regions()
        for stub in server.processes(STUB):
            stub.suspend()
        server.process.kill()
        assert server.wait_end() == -signal.SIGKILL


def test_engine_and_stubs_killed_together_end_the_server(chain_repository: Path) -> None:
    """Nobody is left then who could tell limpet-serve."""
    with loaded_server(chain_repository) as (server, clients):
        server.note_regions()
        kill([*server.processes(ENGINE), *server.processes(STUB)])
        assert server.wait_end() == 1
        # tritonserver 2.51 now and then aborts by itself when all its stubs go at once
        assert "died" in server.log()
        assert "Traceback" not in server.log() or "tritonserver was killed by signal 6" in server.log()
        _assert_all_end(clients, BROKEN_OFF_S)


def test_everything_killed_but_limpet_serve_leaves_nothing(chain_repository: Path) -> None:
    with loaded_server(chain_repository) as (server, clients):
        server.note_regions()
        kill(process for process in server.processes() if process.pid != server.process.pid)
        _assert_all_end(clients, BROKEN_OFF_S)
        assert server.wait_end() == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_under_load_meets_the_drain_deadline(chain_repository: Path, number: signal.Signals) -> None:
    with loaded_server(chain_repository, "--drain-deadline=1") as (server, clients):
        assert server.stop(number) == 0
        _assert_all_end(clients, BROKEN_OFF_S)


def test_stop_lets_running_answers_finish_and_refuses_new_ones(chain_repository: Path) -> None:
    with live_server(chain_repository) as server:
        server.wait_ready()
        with wire(server.target, "chain") as client, wire(server.target, "chain") as late:
            client.send(text_input="long", max_tokens=20_000, stream=True)
            first = client.next()
            server.process.send_signal(signal.SIGTERM)
            refused = _first_refusal(late)
            assert text_of([first, *client.rest()]) == script("long").text
        assert "UNAVAILABLE" in refused or "drain" in refused or "stopping" in refused
        assert server.wait_end() == 0


def _first_refusal(client: Wire) -> str:
    """Ask until the server refuses: the signal takes a moment to become a drain."""
    while True:
        error = client.ask(text_input="hello", max_tokens=1, stream=True)[-1].error
        if error is not None:
            return error
