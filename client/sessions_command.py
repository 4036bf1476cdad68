"""limpet-sessions: the sessions that a server keeps, for people and scripts."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from limpet.client.arguments import address
from limpet.client.client import Client
from limpet.client.errors import LimpetError

_EPILOG = """\
DEVICE, HOST and NONE count the cache blocks of a session's history: in the device's memory, in host memory, or given
up, so that they are computed again when the session goes on.

The server's admin_key, if it has one, is read from the environment variable LIMPET_ADMIN_KEY.

exit codes: 0; 1 no server, no such session, or the server refused; 2 wrong usage.
"""
_COLUMNS = ("SESSION", "TOKENS", "TURNS", "DEVICE", "HOST", "NONE", "IDLE")


def main() -> int:
    """Entry point of the command."""
    arguments = _parser().parse_args()
    command: Callable[[Client, argparse.Namespace], dict[str, Any]] = arguments.run
    try:
        with Client(arguments.server, model=arguments.model, admin_key=os.environ.get("LIMPET_ADMIN_KEY")) as client:
            answer = command(client, arguments)
    except LimpetError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(answer, indent=2) if arguments.json else "\n".join(_lines(answer)))
    return 0


def _list(client: Client, arguments: argparse.Namespace) -> dict[str, Any]:
    return client.admin("sessions", limit=arguments.limit)


def _show(client: Client, arguments: argparse.Namespace) -> dict[str, Any]:
    return client.admin("sessions", action="show", session_id=arguments.id)


def _fork(client: Client, arguments: argparse.Namespace) -> dict[str, Any]:
    return client.admin("sessions", action="fork", session_id=arguments.id, new_session_id=arguments.new_id)


def _end(client: Client, arguments: argparse.Namespace) -> dict[str, Any]:
    return client.admin("sessions", action="end", session_id=arguments.id)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="limpet-sessions",
        description="List, show, fork and end the sessions of a Limpet server.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("server", type=address, metavar="HOST:PORT", help="the server's gRPC address")
    parser.add_argument("--model", help="needed only if the server has several")
    parser.add_argument("--json", action="store_true", help="print the server's answer as JSON")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    listed = commands.add_parser("list", help="the sessions, the last used one last")
    listed.add_argument("--limit", type=int, default=1000, metavar="N", help="only the last N used (default: 1000)")
    listed.set_defaults(run=_list)
    for name, run, description in (
        ("show", _show, "one session"),
        ("fork", _fork, "begin a second session as a copy of an idle one; both share its cache"),
        ("end", _end, "free a session; a running answer is cancelled"),
    ):
        command = commands.add_parser(name, help=description)
        command.add_argument("id", metavar="ID", help="the session's id")
        command.set_defaults(run=run)
        if name == "fork":
            command.add_argument("new_id", metavar="NEW_ID", nargs="?", help="default: a random one")
    return parser


def _lines(answer: dict[str, Any]) -> list[str]:
    """The answer for people: a table of sessions, or what was done."""
    if "ended" in answer:
        return ["The session was ended." if answer["ended"] else "There was no such session."]
    sessions = answer["sessions"] if "sessions" in answer else [answer["session"]]
    rows = [_COLUMNS, *map(_row, sessions)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [f"{row[0]:<{widths[0]}}" + _right_aligned(row[1:], widths[1:]) for row in rows]
    num_left_out = answer.get("total", len(sessions)) - len(sessions)
    return [*lines, f"… and {num_left_out} more, used less recently"] if num_left_out else lines


def _row(session: dict[str, Any]) -> tuple[str, ...]:
    blocks = session["blocks"]
    counts = (session["tokens"], session["turns"], blocks["device"], blocks["host"], blocks["none"])
    return (
        _printable(session["session_id"]),
        *map(str, counts),
        "running" if session["running"] else _duration(session["idle_s"]),
    )


def _printable(session_id: str) -> str:
    """Clients choose ids: none may move the cursor of who lists them."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in session_id)


def _right_aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    return "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
