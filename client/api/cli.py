"""limpet-api: OpenAI's API over HTTP, in front of a running server."""

import argparse
import contextlib
import os
import signal
from pathlib import Path

import uvicorn

from limpet.client.api.app import create_app
from limpet.client.arguments import address, port

_EPILOG = """\
The endpoint listens on this machine only unless --host says otherwise; then give it keys as well: one a line in the
file of --api-keys, or one in the environment variable LIMPET_API_KEY. /health and /metrics need none.

exit codes: 0 stopped by Ctrl-C or SIGTERM; 1 the endpoint could not be started; 2 wrong usage.
"""
_STOP_S = 10


def main() -> int:
    """Entry point of the command."""
    arguments = _parser().parse_args()
    app = create_app(arguments.server, arguments.api_keys)
    config = uvicorn.Config(
        app,
        host=arguments.host,
        port=arguments.port,
        log_level=arguments.log_level,
        access_log=arguments.log_level == "debug",
        timeout_graceful_shutdown=_STOP_S,
        server_header=False,
    )
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises the signal again once it has stopped
        signal.signal(number, lambda number, frame: None)
    server = uvicorn.Server(config)
    with contextlib.suppress(SystemExit):  # of a port that is taken: said already, with a code of uvicorn's own
        server.run()
    return 0 if server.started else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="limpet-api",
        description="Serve OpenAI's API in front of a Limpet server.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("server", type=address, metavar="HOST:PORT", help="gRPC address of the Limpet server")
    add("--host", default="127.0.0.1", help="listen there (default: %(default)s)")
    add("--port", type=port, default=23333, help="default: %(default)s")
    add("--api-keys", type=_keys, default=_key_of_environment(), metavar="FILE", help="keys that let a request in")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="default: %(default)s")
    return parser


def _keys(path: str) -> list[str]:
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read the keys: {error}") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise argparse.ArgumentTypeError(f"{path} holds no key")
    return keys


def _key_of_environment() -> list[str]:
    key = os.environ.get("LIMPET_API_KEY", "").strip()
    return [key] if key else []
