"""limpet-webui: the chat page in the browser, in front of a running server."""

import argparse
import os
import sys

from limpet.client.arguments import address, port
from limpet.commands.interrupt import ending_at_once

_EPILOG = """\
The page listens on this machine only unless --host says otherwise; then give it --auth as well.

exit codes: 0 stopped by Ctrl-C; 1 the page could not be started; 2 wrong usage.
"""


def main() -> int:
    """Entry point of the command."""
    arguments = _parser().parse_args()
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before Gradio is imported: it asks its makers' server otherwise
    with ending_at_once():
        from limpet.webui.serve import serve

    try:
        serve(arguments.server, arguments.host, arguments.port, arguments.auth, arguments.root_path)
    except OSError as error:
        print(f"limpet-webui: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="limpet-webui",
        description="Serve the chat page.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("server", type=address, metavar="HOST:PORT", help="gRPC address of the Limpet server")
    add("--host", default="127.0.0.1", help="listen there (default: %(default)s)")
    add("--port", type=port, default=6006, help="default: %(default)s")
    add("--auth", type=_auth, metavar="USER:PASSWORD", help="ask for these")
    add("--root-path", default="", metavar="PATH", help="path under which a proxy shows the page, such as /chat")
    return parser


def _auth(text: str) -> tuple[str, str]:
    user, colon, password = text.partition(":")
    if not (user and colon and password):
        raise argparse.ArgumentTypeError("--auth wants USER:PASSWORD")
    return user, password
