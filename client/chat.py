"""limpet-chat: a conversation in the terminal, with a server or with a private one started for it."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from limpet.client.chat_loop import ChatLoop
from limpet.client.client import Client
from limpet.client.endpoint import check_address
from limpet.client.errors import InvalidRequest, LimpetError
from limpet.client.options import Options
from limpet.client.private_server import private_server
from limpet.client.terminal import Terminal

_EPILOG = """\
TARGET is the gRPC address of a running server, or a workspace folder written by limpet-convert: then a private server
is started on free ports of this machine and stopped at the end.

With a pipe as standard input or output each line is a question, and only the answers go to standard output.

exit codes: 0; 1 no server, or a question failed; 2 wrong usage.
"""


def main() -> int:
    """Entry point of the command."""
    arguments = _parser().parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    terminal = Terminal()
    try:
        with _server(arguments.target, terminal) as address, Client(address, model=arguments.model) as client:
            return _chat(client, terminal, arguments)
    except LimpetError as error:
        terminal.complain(str(error))
        return 1


def _chat(client: Client, terminal: Terminal, arguments: argparse.Namespace) -> int:
    model = client.model
    if terminal.is_interactive:
        terminal.note(f"{model} at {client.address}; /help lists the commands, Ctrl-D leaves.")
    loop = ChatLoop(client, terminal, arguments.system, _options(arguments))
    try:
        loop.run()
    finally:
        terminal.save_history()
    return 1 if loop.num_errors else 0


@contextlib.contextmanager
def _server(target: str, terminal: Terminal) -> Iterator[str]:
    """The server's address; for a folder that of a private server."""
    if not Path(target).is_dir():
        yield target
        return
    with private_server(Path(target), terminal.show_status) as address:
        terminal.end_status()
        yield address
        terminal.show_status("Stopping the server ...")
    terminal.end_status()


def _target(text: str) -> str:
    """An address, or a folder that exists."""
    if Path(text).is_dir():
        return text
    try:
        return check_address(text)
    except InvalidRequest:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a folder nor HOST:PORT") from None


def _options(arguments: argparse.Namespace) -> Options:
    names = Options.__optional_keys__ & vars(arguments).keys()
    return cast(Options, {name: getattr(arguments, name) for name in names})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="limpet-chat",
        description="Chat with a model.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("target", type=_target, metavar="TARGET", help="HOST:PORT or WORKSPACE")
    add("--model", help="needed only if the server has several")
    add("--system", metavar="TEXT", help="system prompt")
    add("--temperature", type=float, help="0 gives always the most likely token")
    add("--top-p", type=float, help="keep the most likely tokens of this total probability")
    add("--top-k", type=int, help="keep so many of the most likely tokens")
    add("--repetition-penalty", type=float, help="above 1: repeat less")
    add("--max-tokens", type=int, help="end each answer after so many tokens")
    add("--seed", type=int, help="makes answers repeatable")
    return parser
