"""limpet-serve with a real tritonserver and a model without engine: every way in which it can start and end."""

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.aids.live_server import GONE_S, LIMPET_SERVE, kill, live_server, wait_ended
from tests.aids.wire import post

pytestmark = pytest.mark.server
MakeRepository = Callable[..., Path]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stop_signals_end_with_code_0_and_leave_nothing(
    make_repository: MakeRepository, number: signal.Signals
) -> None:
    with live_server(make_repository()) as server:
        server.wait_ready()
        assert server.stop(number) == 0


def test_summary_names_models_addresses_and_the_chat_command(make_repository: MakeRepository) -> None:
    with live_server(_with_second_model(make_repository())) as server:
        summary = server.wait_ready()
        assert "smollm" in summary
        assert "limpet_admin" not in summary
        assert f"limpet-chat {server.target}" in summary
        assert f"{server.http}/v2/models/smollm/generate" in summary
        assert server.stop() == 0


def test_server_listens_on_loopback_only(make_repository: MakeRepository) -> None:
    with live_server(make_repository()) as server:
        server.wait_ready()
        connections = [each for process in server.processes() for each in process.net_connections("tcp")]
        listening = {each.laddr for each in connections if each.status == psutil.CONN_LISTEN}
        assert {address.port for address in listening} == {server.grpc_port, server.http_port, server.metrics_port}
        assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
        assert server.stop() == 0


def test_killed_tritonserver_ends_limpet_serve_with_the_cause(make_repository: MakeRepository) -> None:
    with live_server(make_repository()) as server:
        server.wait_ready()
        server.note_regions()
        kill([server.only("bin/tritonserver")])
        assert server.wait_end() == 1
        assert "tritonserver was killed by signal 9" in server.log()


def test_killed_python_backend_ends_the_server_though_nobody_tells(make_repository: MakeRepository) -> None:
    with live_server(make_repository()) as server:
        server.wait_ready()
        server.note_regions()
        kill([server.only("triton_python_backend_stub")])
        assert server.wait_end() == 1
        assert "The Python backend process of limpet_admin died." in server.log()


def test_unloaded_model_is_no_dead_one(make_repository: MakeRepository) -> None:
    repository = _with_second_model(make_repository())
    with live_server(repository, ["--model-control-mode=explicit", "--load-model=*"]) as server:
        server.wait_ready()
        for action in ("unload", "load", "unload"):
            assert post(server.http, f"/v2/repository/models/smollm/{action}", {})[0] == 200
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(4)
        assert server.stop() == 0


def test_killed_limpet_serve_takes_every_process_along_and_the_next_one_cleans_up(
    make_repository: MakeRepository,
) -> None:
    with live_server(make_repository()) as server:
        server.wait_ready()
        server.note_regions()
        family = server.processes()
        server.process.kill()
        assert not wait_ended(family, GONE_S)
        assert list(server.folder.glob("limpet-*")), "no engine was there to clean up"
        follower = subprocess.run(
            [LIMPET_SERVE, *server.flags, "--ready-deadline=0"],
            env={**os.environ, "TMPDIR": str(server.folder)},
            timeout=GONE_S,
            check=False,
        )
        assert follower.returncode == 1
        server.assert_nothing_left()


def test_lost_front_end_ends_the_server_with_the_cause(make_repository: MakeRepository) -> None:
    with live_server(make_repository()) as server:
        server.wait_ready()
        folder = next(server.folder.glob("limpet-*"))
        (folder / "front-end-died.tmp").write_text("Front end m_0 (process 7) was killed by signal 9.")
        (folder / "front-end-died.tmp").rename(folder / "front-end-died")
        assert server.wait_end() == 1
        assert "Front end m_0 (process 7) was killed by signal 9." in server.log()


def test_model_that_fails_to_load_ends_with_code_1(make_repository: MakeRepository) -> None:
    with live_server(make_repository("fails_to_load")) as server:
        assert server.wait_end() == 1
        assert "its weights are missing" in server.log()
        assert "tritonserver ended with exit code 1" in server.log()


def test_load_that_never_ends_meets_the_ready_deadline(make_repository: MakeRepository) -> None:
    with live_server(make_repository("never_loads"), ["--ready-deadline=3"]) as server:
        assert server.wait_end() == 1
        assert "not ready within 3 s" in server.log()


def test_ctrl_c_while_loading_leaves_nothing(make_repository: MakeRepository) -> None:
    repository = make_repository("never_loads")
    started = repository / "never_loads" / "1" / "started"
    os.mkfifo(started)
    with live_server(repository) as server:
        started.read_text()  # returns once the model's load has begun
        assert server.stop(signal.SIGINT) == 0


def test_drain_waits_for_running_requests(make_repository: MakeRepository) -> None:
    with live_server(make_repository()) as server:
        server.wait_ready()
        busy = server.repository / "limpet_admin" / "1" / "busy"
        busy.touch()
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(2)
        busy.unlink()
        assert server.wait_end() == 0
        assert "1 running requests" in server.log()


@pytest.mark.parametrize("flags", [["--drain-deadline=0"], []], ids=["deadline", "second signal"])
def test_drain_is_cut_short(make_repository: MakeRepository, flags: list[str]) -> None:
    with live_server(make_repository(), flags) as server:
        server.wait_ready()
        (server.repository / "limpet_admin" / "1" / "busy").touch()
        server.process.send_signal(signal.SIGTERM)
        if not flags:
            with pytest.raises(subprocess.TimeoutExpired):
                server.process.wait(1)
            server.process.send_signal(signal.SIGTERM)
        assert server.wait_end() == 0


def test_port_in_use_is_refused_in_one_sentence(make_repository: MakeRepository) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = subprocess.run(
            [LIMPET_SERVE, f"--model-repository={make_repository()}", f"--http-port={port}"],
            capture_output=True,
            text=True,
            timeout=GONE_S,
            check=False,
        )
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert f"Port {port} on 127.0.0.1 cannot be used for http" in run.stderr
    assert "--http-port" in run.stderr


def _with_second_model(repository: Path) -> Path:
    """limpet_admin's twin under a model's name."""
    (repository / "smollm").mkdir()
    (repository / "smollm" / "config.pbtxt").write_bytes((repository / "limpet_admin" / "config.pbtxt").read_bytes())
    (repository / "smollm" / "1").symlink_to(repository / "limpet_admin" / "1")
    return repository
