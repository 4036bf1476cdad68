"""limpet-serve's command line: a few flags of its own, every other one goes to tritonserver as it is."""

import argparse
from dataclasses import dataclass
from pathlib import Path

_EPILOG = """\
Every other flag is passed to tritonserver unchanged (tritonserver --help lists them), for example
--log-verbose=1 or --model-control-mode=explicit.

exit codes: 0 stopped by Ctrl-C, SIGTERM or SIGHUP; 1 the server failed, did not become ready or one of its processes
died; 2 nothing was started, the message says why.
"""


@dataclass(frozen=True)
class Endpoint:
    """Where one of tritonserver's protocols listens; `flag` is the option that changes the port."""

    protocol: str
    address: str
    port: int

    @property
    def flag(self) -> str:
        return f"--{self.protocol}-port"

    @property
    def host(self) -> str:
        """Where a client on this machine can connect."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address, self.address)

    @property
    def target(self) -> str:
        """host:port that a client on this machine can connect to."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Options:
    """The parsed command line."""

    model_repositories: tuple[Path, ...]
    grpc: Endpoint
    http: Endpoint | None
    metrics: Endpoint | None
    ready_deadline_s: float
    drain_deadline_s: float
    passthrough: tuple[str, ...]

    @property
    def endpoints(self) -> list[Endpoint]:
        return [endpoint for endpoint in (self.grpc, self.http, self.metrics) if endpoint is not None]

    def tritonserver_flags(self) -> list[str]:
        """The flags for tritonserver; the user's own come last, so they win."""
        flags = [f"--model-repository={folder}" for folder in self.model_repositories]
        for endpoint in self.endpoints:
            flags += [f"--{endpoint.protocol}-address={endpoint.address}", f"{endpoint.flag}={endpoint.port}"]
        return [*flags, *self.passthrough]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="limpet-serve",
        description="Start tritonserver on a model repository, wait until it answers, stop it cleanly.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model-repository", "--model-store", action="append", required=True, type=Path, metavar="FOLDER")
    add("--address", default="127.0.0.1", help="listen there (default: %(default)s, this machine only)")
    add("--grpc-port", type=_port, default=8001, metavar="PORT", help="default: %(default)s")
    add("--http-port", type=_port, default=8000, metavar="PORT", help="default: %(default)s")
    add("--metrics-port", type=_port, default=8002, metavar="PORT", help="default: %(default)s")
    add("--ready-deadline", type=_seconds, default=600.0, metavar="S", help="give up if not ready by then (600)")
    add("--drain-deadline", type=_seconds, default=30.0, metavar="S", help="time running requests get to finish (30)")
    return parser


def parse_options(arguments: list[str]) -> Options:
    """Parse the command line; argparse prints a usage error and exits with code 2."""
    parser = _parser()
    own, rest = parser.parse_known_args(arguments)
    if stray := _stray_words(rest):
        parser.error(f"unexpected argument {stray[0]!r}")
    if _switched_off(rest, "allow-grpc") or _switched_on(rest, "grpc-use-ssl"):
        parser.error("limpet-serve needs plain gRPC to ask the server whether it is ready: no --grpc-use-ssl here")

    def endpoint(protocol: str, port: int) -> Endpoint:
        return Endpoint(protocol, _value(rest, f"{protocol}-address") or own.address, port)

    options = Options(
        model_repositories=tuple(own.model_repository),
        grpc=endpoint("grpc", own.grpc_port),
        http=None if _switched_off(rest, "allow-http") else endpoint("http", own.http_port),
        metrics=None if _switched_off(rest, "allow-metrics") else endpoint("metrics", own.metrics_port),
        ready_deadline_s=own.ready_deadline,
        drain_deadline_s=own.drain_deadline,
        passthrough=tuple(rest),
    )
    if len({endpoint.port for endpoint in options.endpoints}) < len(options.endpoints):
        parser.error("the ports of gRPC, HTTP and metrics must differ")
    return options


def _port(text: str) -> int:
    port = int(text)
    if not 1 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is no port: 1 to 65535")
    return port


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time: seconds, 0 or more")
    return seconds


def _value(rest: list[str], name: str) -> str | None:
    """The last value of a passed-through flag, written --name=value or --name value."""
    found = None
    for index, word in enumerate(rest):
        if word.startswith(f"--{name}="):
            found = word.split("=", 1)[1]
        elif word == f"--{name}":
            found = rest[index + 1] if index + 1 < len(rest) else ""
    return found


def _switched_off(rest: list[str], name: str) -> bool:
    return (_value(rest, name) or "true").lower() in ("false", "0")


def _switched_on(rest: list[str], name: str) -> bool:
    return (_value(rest, name) or "false").lower() in ("true", "1")


def _stray_words(rest: list[str]) -> list[str]:
    """Words that belong to no flag: a forgotten --model-repository, mostly."""
    return [
        word
        for index, word in enumerate(rest)
        if not word.startswith("-") and (index == 0 or not rest[index - 1].startswith("-") or "=" in rest[index - 1])
    ]
