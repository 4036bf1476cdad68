"""limpet-doctor: is this machine fit to serve, and if not, what to do."""

import argparse
from collections.abc import Iterator

import torch

from limpet.backend.doctor.compiler_checks import check_kernel, check_ptxas, check_triton
from limpet.backend.doctor.finding import Finding
from limpet.backend.doctor.gpu_checks import check_driver, check_gpu, check_torch, driver_cuda_version
from limpet.backend.doctor.server_checks import (
    check_installed,
    check_numpy_version,
    check_python,
    check_shared_memory,
    check_tritonserver,
)

_EPILOG = """\
Nothing is changed; on a GPU one small kernel is compiled and run.

exit codes: 0 the machine can serve; 1 a fault was found, its line says what to do; 2 wrong usage.
"""


def main() -> int:
    """Entry point of the command."""
    argparse.ArgumentParser(
        prog="limpet-doctor",
        description="Check whether this machine can serve models, and say what to do where it cannot.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    num_faults = 0
    for finding in findings():
        print("\n".join(finding.lines()), flush=True)
        num_faults += finding.state == "fault"
    print("This machine can serve." if not num_faults else f"{num_faults} fault{'s' * (num_faults > 1)} found.")
    return 1 if num_faults else 0


def findings() -> Iterator[Finding]:
    """One after the other, as they are found; what only a GPU needs is left out without one."""
    yield check_python()
    yield check_numpy_version()
    yield check_torch()
    yield check_gpu()
    if torch.cuda.is_available():
        yield check_driver()
        yield check_triton()
        yield check_ptxas(driver_cuda_version())
        yield check_kernel()
    yield check_tritonserver()
    yield check_installed()
    yield check_shared_memory()
