"""The command limpet-serve."""

import sys

from limpet.backend.serve.errors import ServeError
from limpet.backend.serve.options import parse_options
from limpet.backend.serve.supervisor import serve


def main() -> int:
    """Serve until stopped; returns the exit code: 0 clean stop, 1 failure, 2 refused (see --help)."""
    try:
        return serve(parse_options(sys.argv[1:]))
    except ServeError as error:
        print(f"limpet-serve: {error}", file=sys.stderr)
        return error.exit_code
