"""limpet-ready: is the server ready to answer? For scripts and for Kubernetes' probes."""

import argparse
import time

from limpet.client.arguments import address, seconds
from limpet.client.client import Client

_ASK_EVERY_S = 0.25
_EPILOG = """\
Ready means that the engine answers within a second and makes progress. Triton's own health check answers 200 also
while the engine is down, so use this one.

exit codes: 0 ready; 1 not ready, the line printed says why; 2 wrong usage.
"""


def main() -> int:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(
        prog="limpet-ready",
        description="Say whether a Limpet server is ready.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("server", type=address, metavar="HOST:PORT", help="the server's gRPC address")
    parser.add_argument("--timeout", type=seconds, default=0.0, metavar="S", help="wait so long for it (default: 0)")
    parser.add_argument("--model", help="ask about this model only (default: all of the server)")
    arguments = parser.parse_args()
    with Client(arguments.server, model=arguments.model) as client:
        reason = wait_ready(client, arguments.timeout)
    print(f"{arguments.server} is ready." if reason is None else f"{arguments.server} is not ready: {reason}")
    return 0 if reason is None else 1


def wait_ready(client: Client, timeout_s: float) -> str | None:
    """Wait until the server is ready; None, or why it is not when the time is over."""
    deadline = time.monotonic() + timeout_s
    while (reason := client.why_not_ready()) is not None and time.monotonic() < deadline:
        time.sleep(_ASK_EVERY_S)
    return reason
