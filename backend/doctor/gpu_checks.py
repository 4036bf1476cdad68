"""The GPU, its driver and what torch makes of them."""

import ctypes
import platform
from pathlib import Path

import torch

from limpet.backend.doctor.finding import Finding

Version = tuple[int, int]

DEVICE_FILE = Path("/dev/nvidiactl")
BFLOAT16_FROM = (8, 0)  # compute capability
NO_GPU = "none: models run on the CPU, in float32"


def driver_cuda_version() -> Version | None:
    """The newest CUDA that the driver runs; None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def check_gpu() -> Finding:
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        text = f"{torch.cuda.device_count()} × {properties.name}, {properties.total_memory / (1 << 30):.0f} GiB each"
        if (properties.major, properties.minor) < BFLOAT16_FROM:
            return Finding("GPU", "note", text, "It computes no bfloat16: convert or serve with dtype float16.")
        return Finding("GPU", "ok", text)
    return no_gpu(DEVICE_FILE.exists(), driver_cuda_version(), torch.version.cuda, str(torch.__version__))


def no_gpu(has_device: bool, driver: Version | None, torch_cuda: str | None, torch_version: str) -> Finding:
    """Why torch sees no GPU."""
    if not has_device:
        return Finding("GPU", "note", NO_GPU)
    if driver is None:
        advice = "libcuda.so.1 is missing: install the driver's libraries, or start the container with --gpus all."
    elif torch_cuda is None:
        advice = (
            f"torch {torch_version} is built for the CPU: install a build for CUDA {driver[0]}.{driver[1]} or older."
        )
    elif _version(torch_cuda)[0] > driver[0]:
        advice = (
            f"torch {torch_version} is built for CUDA {torch_cuda}, the driver runs up to {driver[0]}.{driver[1]}: "
            "update the driver, or install a build of torch for that version."
        )
    else:
        advice = "torch finds none all the same: see what `python -c 'import torch; torch.cuda.init()'` says."
    return Finding("GPU", "fault", "there is one, but torch cannot use it", advice)


def check_driver() -> Finding:
    version = driver_cuda_version()
    if version is None:
        return Finding("driver", "note", "none")
    return Finding("driver", "ok", f"runs CUDA up to {version[0]}.{version[1]}")


def check_torch() -> Finding:
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
    return Finding("torch", "ok", f"{torch.__version__} for {built_for}, {platform.machine()}")


def _version(text: str) -> Version:
    major, minor, *_ = (int(part) for part in f"{text}.0".split(".")[:2])
    return major, minor
