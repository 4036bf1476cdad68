"""What must hold before anything is started."""

import socket
from importlib import metadata
from pathlib import Path

from limpet.backend.serve.admin import ADMIN_MODEL
from limpet.backend.serve.errors import RefusedError
from limpet.backend.serve.options import Endpoint, Options


def check(options: Options) -> None:
    """Raise RefusedError for what would fail later, silently or without a clear message."""
    check_numpy(metadata.version("numpy"))
    for folder in options.model_repositories:
        check_repository(folder)
    if not any((folder / ADMIN_MODEL).is_dir() for folder in options.model_repositories):
        raise RefusedError(
            f"The model repository has no model {ADMIN_MODEL}: limpet-convert writes it beside the converted model."
        )
    for endpoint in options.endpoints:
        check_port(endpoint)


def check_numpy(version: str) -> None:
    if int(version.split(".")[0]) >= 2:
        raise RefusedError(
            f"numpy {version} is installed, but Triton's Python backend exchanges wrong tensors with numpy 2 without "
            "any error: run `pip install 'numpy<2'`."
        )


def check_repository(folder: Path) -> None:
    if not folder.is_dir():
        raise RefusedError(f"There is no model repository {folder}: limpet-convert makes one.")


def check_port(endpoint: Endpoint) -> None:
    """Bind the port for a moment, as tritonserver will."""
    family = socket.AF_INET6 if ":" in endpoint.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((endpoint.address, endpoint.port))
        except OSError as error:
            raise RefusedError(
                f"Port {endpoint.port} on {endpoint.address} cannot be used for {endpoint.protocol} "
                f"({error.strerror}): choose another with {endpoint.flag}."
            ) from None
