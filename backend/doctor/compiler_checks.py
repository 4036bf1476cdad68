"""Triton, its assembler ptxas, and whether a kernel of ours compiles and runs.

Triton brings a ptxas of its own, made for the CUDA version that its build was. What that one emits an older driver
refuses, and only when the first kernel is loaded.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from limpet.backend.doctor.finding import Finding
from limpet.backend.doctor.gpu_checks import Version

PTXAS_VARIABLE = "TRITON_PTXAS_PATH"
_PROBE_TIMEOUT_S = 300
_PROBE = "limpet.backend.doctor.kernel_probe"


def check_triton() -> Finding:
    if find_spec("triton") is None:
        return Finding("Triton", "fault", "is missing", "torch for CUDA brings it: `pip install triton`.")
    return Finding("Triton", "ok", metadata.version("triton"))


def check_ptxas(driver: Version | None) -> Finding:
    """The assembler that Triton will call, beside what the driver runs."""
    path = ptxas_path()
    if path is None or not path.exists():
        where = f"{PTXAS_VARIABLE}={path}" if PTXAS_VARIABLE in os.environ else "Triton's own"
        return Finding(
            "ptxas", "fault", f"{where} is missing", f"Let {PTXAS_VARIABLE} name a ptxas of the CUDA toolkit."
        )
    return judge_ptxas(path, ptxas_version(path), driver, _others(path))


def ptxas_path() -> Path | None:
    """What the environment names, else the one inside Triton's package."""
    if named := os.environ.get(PTXAS_VARIABLE):
        return Path(named)
    spec = find_spec("triton")
    roots = list(spec.submodule_search_locations or []) if spec else []
    return Path(roots[0]) / "backends" / "nvidia" / "bin" / "ptxas" if roots else None


def ptxas_version(path: Path) -> Version | None:
    """The CUDA release that this ptxas is of; None if it does not run."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    except OSError:
        return None
    found = re.search(r"release (\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else None


def judge_ptxas(path: Path, version: Version | None, driver: Version | None, others: dict[Path, Version]) -> Finding:
    """Drivers run what older releases of their own major version and all before emit, and newer ones of it mostly."""
    if version is None:
        return Finding("ptxas", "fault", f"{path} does not run", f"Let {PTXAS_VARIABLE} name one that does.")
    text = f"{path} of CUDA {version[0]}.{version[1]}"
    if driver is None or version[0] <= driver[0]:
        return Finding("ptxas", "ok", text)
    fitting = sorted(other for other, its in others.items() if its[0] <= driver[0])
    example = fitting[-1] if fitting else f"/usr/local/cuda-{driver[0]}.{driver[1]}/bin/ptxas"
    advice = (
        f"The driver runs CUDA up to {driver[0]}.{driver[1]} and may refuse its kernels: update the driver, or "
        f"export {PTXAS_VARIABLE}={example}" + ("." if fitting else " (from that version's toolkit).")
    )
    return Finding("ptxas", "fault", text, advice)


def check_kernel() -> Finding:
    """Compile and run one kernel, in a process of its own: a bad one may end it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", _PROBE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=_PROBE_TIMEOUT_S,
    )
    return judge_kernel(run.returncode, run.stdout + run.stderr)


def judge_kernel(exit_code: int, output: str) -> Finding:
    """A finding from what the probe's process said."""
    if exit_code == 0:
        return Finding("kernels", "ok", "one was compiled and gave the right result")
    lines = [line.strip() for line in output.splitlines() if line.strip()] or [f"exit code {exit_code}"]
    telling = [line for line in lines if re.search(r"ptxas|PTX|kernel image|Python\.h|gcc|compiler", line)]
    reason = (telling or lines)[-1][:200]
    if re.search(r"Python\.h|gcc|C compiler", output):
        advice = "Triton compiles its launcher with a C compiler: install gcc and this Python's headers (python3-dev)."
    elif re.search(r"ptxas|PTX|kernel image", output):
        advice = f"Triton's ptxas does not fit this driver: let {PTXAS_VARIABLE} name one of the driver's CUDA version."
    else:
        advice = f"See the whole message with `{Path(sys.executable).name} -m {_PROBE}`."
    return Finding("kernels", "fault", f"the first one failed: {reason}", advice)


def _others(path: Path) -> dict[Path, Version]:
    """Further ptxas of this machine: on PATH and in the usual places of CUDA toolkits."""
    on_path = shutil.which("ptxas")
    places = [*([Path(on_path)] if on_path else []), *Path("/usr/local").glob("cuda*/bin/ptxas")]
    versions = {place: ptxas_version(place) for place in places if place != path}
    return {place: version for place, version in versions.items() if version is not None}
