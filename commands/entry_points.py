"""What the installed commands call: their libraries take seconds to import, in which Ctrl-C may come already."""

import importlib
import sys

from limpet.commands.interrupt import ending_at_once

_INTERRUPTED = 130  # what shells report for a Ctrl-C


def convert() -> int:
    """limpet-convert."""
    return _run("limpet.converter.cli", extra="convert")


def serve() -> int:
    """limpet-serve."""
    return _run("limpet.backend.serve.cli", extra="server")


def doctor() -> int:
    """limpet-doctor."""
    return _run("limpet.backend.doctor.cli", extra="server")


def chat() -> int:
    """limpet-chat."""
    return _run("limpet.client.chat")


def webui() -> int:
    """limpet-webui."""
    return _run("limpet.webui.cli", extra="webui")


def api() -> int:
    """limpet-api."""
    return _run("limpet.client.api.cli", extra="api")


def bench() -> int:
    """limpet-bench."""
    return _run("limpet.benchmarks.cli", extra="bench")


def ready() -> int:
    """limpet-ready."""
    return _run("limpet.client.ready")


def sessions() -> int:
    """limpet-sessions."""
    return _run("limpet.client.sessions_command")


def _run(module: str, extra: str = "") -> int:
    """Exit code of the module's `main`; 1 and a sentence if the packages of the extra are not installed."""
    try:
        with ending_at_once():
            main = importlib.import_module(module).main
        return int(main())
    except KeyboardInterrupt:
        return _INTERRUPTED
    except ModuleNotFoundError as error:
        if not extra or error.name is None or error.name.startswith("limpet"):
            raise
        print(
            f"The package {error.name} is missing. Install what it takes: pip install 'limpet[{extra}]'",
            file=sys.stderr,
        )
        return 1
