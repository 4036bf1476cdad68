"""limpet-bench: measuring servers and the engine."""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from limpet.commands.interrupt import ending_at_once

_SUBCOMMANDS = {
    "serving": "a running server under load, over gRPC or OpenAI's API",
    "turns": "turns of a session beside the same conversation sent whole, on a server or in this process",
    "engine": "the engine in this process, with random weights of a well-known model's shape",
}


def main() -> int:
    """Entry point of the command; a subcommand's libraries are imported when it is chosen."""
    parser = argparse.ArgumentParser(
        prog="limpet-bench",
        description="Measure servers and the engine.",
        epilog="\n".join(f"  {name:10}{what}" for name, what in _SUBCOMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("subcommand", choices=_SUBCOMMANDS, metavar="SUBCOMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="limpet-bench SUBCOMMAND --help lists them")
    chosen = parser.parse_args(sys.argv[1:2])
    with ending_at_once():
        run: Callable[[Sequence[str]], int] = importlib.import_module(f"limpet.benchmarks.{chosen.subcommand}").main
    return run(sys.argv[2:])
