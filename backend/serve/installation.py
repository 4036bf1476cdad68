"""Which tritonserver runs, and the environment in which its Python backend finds this Python.

The binary inside the wheel nvidia-pytriton brings stubs for several Python versions but no ready backend folder, and a
stub decides by PATH alone which site-packages it sees: by the first `python3` there.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from limpet.backend.serve.errors import RefusedError

_STUB = "triton_python_backend_stub"
_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_LIBPYTHON = f"libpython{_VERSION}.so.1.0"


@dataclass(frozen=True)
class Installation:
    """A tritonserver; `backends` is None where it finds its own."""

    executable: Path
    backends: Path | None
    environment: Mapping[str, str]

    def command(self, flags: list[str]) -> list[str]:
        backends = [] if self.backends is None else [f"--backend-directory={self.backends}"]
        return [str(self.executable), *backends, *flags]


def find_installation(folder: Path) -> Installation:
    """The tritonserver on PATH, else the wheel's, linked into `folder`; raises RefusedError if neither can run."""
    on_path = shutil.which("tritonserver")
    if on_path:
        return Installation(Path(on_path), None, _environment([]))
    wheel = _wheel_root()
    stub = wheel / "python_backend_stubs" / _VERSION / _STUB
    if not stub.exists():
        raise RefusedError(f"The wheel nvidia-pytriton has no Python backend for Python {_VERSION}: use 3.10 to 3.12.")
    libraries = wheel.parent.parent / "nvidia_pytriton.libs"
    installation = Installation(
        executable=wheel / "bin" / "tritonserver",
        backends=_link_backend(folder / "backends", wheel, stub),
        environment=_environment([str(libraries)]),
    )
    _check_stub(stub, installation.environment)
    return installation


def _wheel_root() -> Path:
    spec = importlib.util.find_spec("pytriton")
    roots = list(spec.submodule_search_locations or []) if spec else []
    if not roots:
        raise RefusedError(
            "There is no tritonserver: put one on PATH, or install the wheel that contains it with "
            "`pip install --no-deps nvidia-pytriton==0.7.0`."
        )
    return Path(roots[0]) / "tritonserver"


def _link_backend(backends: Path, wheel: Path, stub: Path) -> Path:
    python = backends / "python"
    python.mkdir(parents=True)
    library = wheel / "backends" / "python"
    for source in (library / "libtriton_python.so", library / "triton_python_backend_utils.py", stub):
        (python / source.name).symlink_to(source)
    return backends


def _environment(libraries: list[str]) -> dict[str, str]:
    """Environment of the server: this Python first on PATH, its own libpython first for the loader.

    Without the latter a distribution's libpython of the same version would run this Python's standard library.
    """
    environment = dict(os.environ)
    own = libpython_folder()
    loader = [*([own] if own else []), *libraries, environment.get("LD_LIBRARY_PATH", "")]
    environment["LD_LIBRARY_PATH"] = ":".join(part for part in loader if part)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', os.defpath)}"
    return environment


def libpython_folder() -> str | None:
    """Where this Python keeps its shared library; None if it has none of its own (the system's loader may know one)."""
    places = (sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix) / "lib")
    return next((str(place) for place in places if place and (Path(place) / _LIBPYTHON).exists()), None)


def _check_stub(stub: Path, environment: Mapping[str, str]) -> None:
    """Run the stub without arguments: the server would wait for ever for one that the loader cannot link."""
    run = subprocess.run([stub], env=environment, capture_output=True, text=True, check=False, timeout=60)
    if run.returncode == 127:
        reason = run.stderr.strip().splitlines()[-1].split(": ", 1)[-1]
        raise RefusedError(
            f"Triton's Python backend cannot start ({reason}): install this Python's shared library, for example "
            f"`apt-get install libpython{_VERSION}`."
        )
