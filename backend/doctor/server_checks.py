"""What tritonserver and its Python backend need."""

import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from limpet.backend.doctor.finding import Finding
from limpet.backend.serve.errors import RefusedError
from limpet.backend.serve.installation import find_installation
from limpet.backend.serve.preflight import check_numpy

SHARED_MEMORY = Path("/dev/shm")
WANTED_SHARED_MEMORY_BYTES = 64 << 20


def check_python() -> Finding:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if (3, 10) <= sys.version_info < (3, 13):
        return Finding("Python", "ok", version)
    return Finding("Python", "fault", version, "Triton's Python backend has stubs for 3.10, 3.11 and 3.12: use those.")


def check_numpy_version() -> Finding:
    version = metadata.version("numpy")
    try:
        check_numpy(version)
    except RefusedError as error:
        return Finding("numpy", "fault", version, str(error))
    return Finding("numpy", "ok", version)


def check_tritonserver() -> Finding:
    """The server that limpet-serve would start, and whether its stub finds this Python's library."""
    with tempfile.TemporaryDirectory(prefix="limpet-doctor-") as folder:
        try:
            installation = find_installation(Path(folder))
        except RefusedError as error:
            return Finding("tritonserver", "fault", "cannot run", str(error))
    source = "on PATH" if installation.backends is None else "of the wheel nvidia-pytriton"
    return Finding("tritonserver", "ok", f"{installation.executable} ({source})")


def check_installed(python: str = sys.executable) -> Finding:
    """Triton's Python backend looks for packages where they are installed, and nowhere else."""
    probe = "import importlib.util as u, sys; sys.exit(u.find_spec('limpet.backend.front_end') is None)"
    run = subprocess.run([python, "-I", "-c", probe], capture_output=True, check=False, timeout=60)
    if run.returncode == 0:
        return Finding("limpet", "ok", "is installed")
    advice = "Triton's Python backend ignores PYTHONPATH: install it for this Python, `pip install 'limpet[server]'`."
    return Finding("limpet", "fault", "is found through PYTHONPATH only", advice)


def check_shared_memory(folder: Path = SHARED_MEMORY) -> Finding:
    """Each front end keeps 1 MB and more there."""
    if not folder.is_dir():
        return Finding("/dev/shm", "fault", "is missing", "Triton's Python backend needs it: mount a tmpfs there.")
    usage = shutil.disk_usage(folder)
    text = f"{usage.free >> 20} MB of {usage.total >> 20} MB are free"
    if usage.free >= WANTED_SHARED_MEMORY_BYTES:
        return Finding("/dev/shm", "ok", text)
    advice = f"{WANTED_SHARED_MEMORY_BYTES >> 20} MB are needed: in Docker give --shm-size=1g, else remove old files."
    return Finding("/dev/shm", "fault", text, advice)
