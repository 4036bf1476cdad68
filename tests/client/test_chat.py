"""limpet-chat and limpet-ready as a person and as a script use them."""

import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.client.chat_process import WAIT_S, chat_pipe, chat_terminal, command
from tests.client.fake_server import FakeServer, data, error, fake_server
from tests.client.session_server import Kept, SessionServer


@pytest.fixture
def kept(server: FakeServer) -> SessionServer:
    """The sessions that `server` keeps."""
    sessions = SessionServer()
    server.answer, server.admin = sessions.answer, sessions.admin
    return sessions


def hold_after(text: str) -> "tuple[threading.Event, object]":
    """A `pause` that holds the reply after `text` until it is cancelled."""
    held = threading.Event()

    def pause(kept: Kept) -> None:
        if kept.history.endswith(text):
            held.set()
            kept.cancel.wait(WAIT_S)

    return held, pause


def test_a_conversation_with_counts_and_ctrl_d(server: FakeServer, kept: SessionServer, tmp_path: Path) -> None:
    with chat_terminal(server.target, "--system", "S", home=tmp_path) as chat:
        chat.expect("tiny at")
        chat.expect("> ")
        chat.type("eins\n")
        chat.expect("<eins>")
        chat.expect("6 tokens · 11 in, 0 cached")
        chat.type("zwei 🐚\n")
        chat.expect("<zwei 🐚>")
        chat.expect("cached")
        chat.expect("> ")
        chat.ctrl_d()
        assert chat.wait() == 0
    assert kept.sessions == {}
    assert "zwei 🐚" in (tmp_path / "limpet" / "chat_history").read_text()


def test_ctrl_c_stops_the_answer_and_the_next_question_works(
    server: FakeServer, kept: SessionServer, tmp_path: Path
) -> None:
    _, kept.pause = hold_after("<lo")
    with chat_terminal(server.target, home=tmp_path) as chat:
        chat.expect("> ")
        chat.type("long\n")
        chat.expect("<lo")
        chat.ctrl_c()
        chat.expect("stopped")
        chat.expect("> ")
        chat.type("next\n")
        chat.expect("<next>")
        (session,) = kept.sessions.values()
        assert session.history == "u:long;<lou:next;<next>"
        chat.expect("> ")
        chat.type("half a li")
        chat.expect("half a li")
        chat.ctrl_c_until(chat.shows("again"))
        chat.expect("again")
        chat.expect("> ")
        chat.type("another")
        chat.expect("another")
        chat.ctrl_c_until(chat.has_ended)
        assert chat.wait() == 0


def test_ctrl_c_stops_the_answer_of_a_server_that_ignores_the_cancel_operation(
    server: FakeServer, kept: SessionServer, tmp_path: Path
) -> None:
    server.admin = lambda operation: {"ready": True, "cancelled": 0}
    kept.pause = lambda each: server.asked[-1].gone.wait(WAIT_S) if each.history.endswith("<lo") else None
    with chat_terminal(server.target, home=tmp_path) as chat:
        chat.expect("> ")
        chat.type("long\n")
        chat.expect("<lo")
        chat.ctrl_c()
        chat.ctrl_c()
        chat.expect("stopped")
        chat.type("/quit\n")
        assert chat.wait() == 0


def test_commands(server: FakeServer, kept: SessionServer, tmp_path: Path) -> None:
    with chat_terminal(server.target, home=tmp_path) as chat:
        chat.expect("> ")
        chat.type("/help\n")
        chat.expect("/reset")
        chat.type("/system Be brief.\n")
        chat.expect("new conversation")
        chat.type("a\n")
        chat.expect("<a>")
        (first,) = kept.sessions
        assert kept.sessions[first].history == "s:Be brief.;u:a;<a>"
        chat.type("/reset\n")
        chat.expect("new conversation")
        assert kept.sessions == {}
        chat.type("/system\n")
        chat.expect("Be brief.")
        chat.type("/stats\n")
        chat.expect("counts off")
        chat.type("//slash\n")
        chat.expect("</slash>")
        chat.type("/nonsense\n")
        chat.expect("no command /nonsense")
        chat.type("/quit\n")
        assert chat.wait() == 0


def test_a_terminal_gets_no_control_characters_from_the_model(
    server: FakeServer, kept: SessionServer, tmp_path: Path
) -> None:
    kept.reply = lambda question: "a\x1b]0;title\x07\r\nb\rc"
    with chat_terminal(server.target, home=tmp_path) as chat:
        chat.expect("> ")
        chat.type("x\n")
        chat.expect("a\ufffd]0;title\ufffd\r\nbc")  # the terminal's own line end, and no return inside a line


def test_in_a_pipe_only_answers_are_printed(server: FakeServer, kept: SessionServer) -> None:
    run = chat_pipe(server.target, "--temperature", "0", "--max-tokens", "4", lines="one\n\ntwo\n")
    assert (run.stdout, run.stderr, run.returncode) == ("<one\n<two\n", "", 0)
    assert server.asked[0].options == {"temperature": 0.0, "max_tokens": 4}
    assert server.asked[1].parameters["sequence_start"] is False


def test_in_a_pipe_the_counts_can_be_asked_for(server: FakeServer, kept: SessionServer) -> None:
    run = chat_pipe(server.target, lines="/stats\none\n/help\n/reset\n/system\n")
    assert run.stdout == "<one>\n"
    counts_on, counts, *rest = run.stderr.splitlines()
    assert (counts_on, "5 tokens · 6 in, 0 cached" in counts) == ("counts on", True)
    assert "/quit           leave, as Ctrl-D does" in rest
    assert rest[-2:] == ["new conversation", "(no system prompt)"]


def test_an_error_after_half_an_answer_stands_on_a_line_of_its_own(server: FakeServer, kept: SessionServer) -> None:
    server.answer = lambda asked: iter([data("half"), error("[INTERNAL] It broke.")])
    run = subprocess.run(
        [command("limpet-chat"), server.target], input="x\n", text=True, timeout=WAIT_S, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert run.stdout == "half\nIt broke.\n"


def test_a_failed_question_is_said_on_stderr_and_in_the_exit_code(server: FakeServer, kept: SessionServer) -> None:
    server.answer = lambda asked: (
        iter([error("[INVALID_ARG] Too long.")]) if "bad" in str(asked.inputs) else kept.answer(asked)
    )
    run = chat_pipe(server.target, lines="bad\ngood\n")
    assert (run.stdout, run.stderr, run.returncode) == ("<good>\n", "Too long.\n", 1)


def test_no_server_is_said_in_one_line() -> None:
    with fake_server() as server:
        gone = server.target
    run = chat_pipe(gone, lines="Hi\n")
    assert (run.stdout, run.returncode) == ("", 1)
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize("target", ["no-such-folder", "127.0.0.1:99999"])
def test_neither_folder_nor_address_is_wrong_usage(target: str) -> None:
    run = chat_pipe(target, lines="Hi\n")
    assert run.returncode == 2
    assert run.stderr.endswith(f"{target!r} is neither a folder nor HOST:PORT\n")


def test_a_folder_without_models_says_what_the_private_server_said(tmp_path: Path) -> None:
    run = chat_pipe(str(tmp_path), lines="Hi\n")
    assert run.returncode == 1
    assert "ended with exit code 2" in run.stderr
    assert "model_repository" in run.stderr


def ready(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [command("limpet-ready"), *arguments], capture_output=True, text=True, timeout=WAIT_S, check=False
    )


def test_ready_and_not_ready_differ_in_exit_code_and_reason(server: FakeServer) -> None:
    run = ready(server.target)
    assert (run.returncode, run.stdout) == (0, f"{server.target} is ready.\n")
    server.admin = lambda operation: {"ready": False, "reason": "The engine is starting."}
    run = ready(server.target)
    assert (run.returncode, run.stdout) == (1, f"{server.target} is not ready: The engine is starting.\n")
    for wrong in (("nonsense",), (server.target, "--timeout=nan"), (server.target, "--timeout=-1")):
        assert ready(*wrong).returncode == 2


def test_ready_waits_for_a_server_that_comes_later() -> None:
    with fake_server() as early:
        port = early.port
    process = subprocess.Popen([command("limpet-ready"), f"127.0.0.1:{port}", "--timeout", str(WAIT_S)])
    time.sleep(1.0)  # that it waits at all; the outcome does not depend on it
    assert process.poll() is None
    with fake_server(port):
        assert process.wait(WAIT_S) == 0
