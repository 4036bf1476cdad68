"""limpet-sessions as a person and as a script use it."""

import json
import subprocess
from typing import Any

import pytest

from tests.client.chat_process import WAIT_S, command
from tests.client.fake_server import FakeServer

BLOCKS = {"device": 3, "host": 2, "none": 1}
IDLE = {"session_id": "ada", "tokens": 90, "turns": 4, "running": False, "idle_s": 3725.4, "blocks": BLOCKS}
RUNNING = {**IDLE, "session_id": "0123456789abcdef", "tokens": 12345, "running": True, "idle_s": 0.0}
TABLE = """\
SESSION           TOKENS  TURNS  DEVICE  HOST  NONE     IDLE
ada                   90      4       3     2     1  1:02:05
0123456789abcdef   12345      4       3     2     1  running
"""


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [command("limpet-sessions"), *arguments],
        capture_output=True, text=True, timeout=WAIT_S, check=False, env=environment,
    )  # fmt: skip


def test_sessions_are_listed_as_a_table_or_as_json(server: FakeServer) -> None:
    server.admin = lambda operation: {"sessions": [IDLE, RUNNING], "total": 5}
    listed = run(server.target, "list", "--limit=2")
    assert (listed.returncode, listed.stdout) == (0, TABLE + "… and 3 more, used less recently\n")
    assert server.operations[-1] == {"op": "sessions", "limit": 2}
    assert json.loads(run(server.target, "--json", "list").stdout) == server.admin({})


@pytest.mark.parametrize(
    ("arguments", "operation", "answer", "printed"),
    [
        (["show", "ada"], {"action": "show", "session_id": "ada"}, {"session": IDLE}, TABLE.splitlines()[1].split()[0]),
        (
            ["fork", "ada", "bob"],
            {"action": "fork", "session_id": "ada", "new_session_id": "bob"},
            {"session": IDLE},
            "90",
        ),
        (["fork", "ada"], {"action": "fork", "session_id": "ada"}, {"session": RUNNING}, "0123456789abcdef"),
        (["end", "ada"], {"action": "end", "session_id": "ada"}, {"ended": True}, "The session was ended."),
        (["end", "ada"], {"action": "end", "session_id": "ada"}, {"ended": False}, "There was no such session."),
    ],
)
def test_each_command_is_one_operation(
    server: FakeServer, arguments: list[str], operation: dict[str, Any], answer: dict[str, Any], printed: str
) -> None:
    server.admin = lambda _: answer
    done = run(server.target, "--model", "tiny", *arguments, LIMPET_ADMIN_KEY="k")
    assert done.returncode == 0
    assert printed in done.stdout
    assert server.operations == [{"op": "sessions", "model": "tiny", "admin_key": "k", **operation}]


def test_an_id_cannot_change_what_a_terminal_shows(server: FakeServer) -> None:
    server.admin = lambda operation: {"session": {**IDLE, "session_id": "é\x1b[2J\n"}}
    assert run(server.target, "show", "é\x1b[2J\n").stdout.splitlines()[1].startswith(r"é\x1b[2J\n ")


def test_a_refusal_goes_to_standard_error(server: FakeServer) -> None:
    server.refusal = "[NOT_FOUND] Session not found: it was ended."
    refused = run(server.target, "show", "ada")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "Session not found: it was ended.\n"
    assert run(server.target).returncode == 2
    assert run("nonsense", "list").returncode == 2
