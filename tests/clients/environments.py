"""A virtual environment of its own for each foreign client, kept in .cache/ until its requirements change.

Only the client itself is pinned: what it brings along is what a user's installation would bring today.
`python -m tests.clients.environments NAME` prints the folder with a client's commands.
"""

import fcntl
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

from tests.aids.repositories import ROOT

REQUIREMENTS = {
    "litellm": ["litellm==1.110.2"],
    "llama-index": ["llama-index-llms-nvidia-triton==0.6.0"],
    "genai-perf": ["genai-perf==0.0.16"],
    "tritonclient": ["tritonclient[all]==2.73.0", "numpy<2"],
    "aiperf": ["aiperf==0.13.0"],
    "lm-eval": ["lm-eval[api]==0.4.13", "transformers"],
    "schemathesis": ["schemathesis==4.32.5"],
}
INSTALL_S = 900
CACHE = ROOT / ".cache" / "clients"
# Newer releases of perf_analyzer want this glibc; on an older system pip installs an empty package instead.
NEW_PERF_ANALYZER_GLIBC = (2, 38)
OLD_PERF_ANALYZER = "tritonclient==2.47.0"


def environment(name: str) -> Path:
    """The folder with the commands of that client's environment, made if it is not there."""
    wanted = json.dumps([REQUIREMENTS[name], sys.version_info[:2]])
    folder = CACHE / f"{name}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            _make(name, folder)
            (folder / "done").touch()
    return folder / "bin"


def _make(name: str, folder: Path) -> None:
    for old in CACHE.glob(f"{name}-*"):
        shutil.rmtree(old)
    _run(sys.executable, "-m", "venv", str(folder))
    _run(str(folder / "bin" / "pip"), "install", "-q", *REQUIREMENTS[name])
    if name == "genai-perf" and _glibc() < NEW_PERF_ANALYZER_GLIBC:
        _install_old_perf_analyzer(folder)


def _install_old_perf_analyzer(folder: Path) -> None:
    """The last one for older systems is inside another package's wheel; the libraries that it lacks are pytriton's."""
    scratch = folder / "perf_analyzer"
    platform_flags = ["--platform", "manylinux1_x86_64", "--only-binary=:all:"]
    _run(
        str(folder / "bin" / "pip"),
        "download",
        "-q",
        "--no-deps",
        *platform_flags,
        "-d",
        str(scratch),
        OLD_PERF_ANALYZER,
    )
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        member = next(each for each in wheel.namelist() if each.endswith("bin/perf_analyzer"))
        (scratch / "perf_analyzer").write_bytes(wheel.read(member))
    libraries = Path(str(distribution("nvidia-pytriton").locate_file("nvidia_pytriton.libs")))
    (scratch / "lib").mkdir()
    for name, pattern in (("libb64.so.0d", "libb64-*.so.0d"), ("libcudart.so.12", "libcudart-*.so.12*")):
        (scratch / "lib" / name).symlink_to(next(libraries.glob(pattern)))
    command = folder / "bin" / "perf_analyzer"
    command.unlink(missing_ok=True)
    command.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH="{scratch}/lib" exec "{scratch}/perf_analyzer" "$@"\n', "utf-8")
    for program in (command, scratch / "perf_analyzer"):
        program.chmod(0o755)


def _glibc() -> tuple[int, ...]:
    return tuple(int(part) for part in platform.libc_ver()[1].split("."))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"


if __name__ == "__main__":
    print(environment(sys.argv[1]))
