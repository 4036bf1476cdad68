"""limpet-doctor: what it says about this machine, and about machines that are not at hand."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from limpet.backend.doctor.compiler_checks import check_kernel, check_ptxas, judge_kernel, judge_ptxas
from limpet.backend.doctor.gpu_checks import DEVICE_FILE, no_gpu
from limpet.backend.doctor.server_checks import check_installed, check_numpy_version, check_shared_memory

PTXAS = Path("/opt/triton/ptxas")


def test_this_machine_can_serve() -> None:
    command = Path(sys.executable).with_name("limpet-doctor")
    run = subprocess.run([command], capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    subjects = re.findall(r"^(ok|note) +(\S+)", run.stdout, re.M)
    assert {"Python", "numpy", "torch", "GPU", "tritonserver", "limpet", "/dev/shm"} <= {
        subject for _, subject in subjects
    }
    assert ("kernels" in {subject for _, subject in subjects}) == DEVICE_FILE.exists()
    assert run.stdout.endswith("This machine can serve.\n")


def test_numpy_2_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _name: "2.4.0")
    found = check_numpy_version()
    assert found.state == "fault"
    assert "pip install 'numpy<2'" in found.advice


def test_small_shared_memory_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 3 << 20, "total": 64 << 20}))
    found = check_shared_memory(tmp_path)
    assert (found.state, found.text) == ("fault", "3 MB of 64 MB are free")
    assert "--shm-size" in found.advice
    assert check_shared_memory(tmp_path / "missing").state == "fault"


def test_a_limpet_that_only_pythonpath_knows_is_a_fault() -> None:
    bare = Path(sys.base_prefix, "bin", "python3")
    found = check_installed(str(bare))
    assert found.state == "fault"
    assert "ignores PYTHONPATH" in found.advice


def test_without_a_gpu_the_cpu_serves() -> None:
    found = no_gpu(has_device=False, driver=None, torch_cuda=None, torch_version="2.13")
    assert (found.state, found.text) == ("note", "none: models run on the CPU, in float32")


@pytest.mark.parametrize(
    ("driver", "torch_cuda", "advice"),
    [
        (None, "13.0", "--gpus all"),
        ((13, 0), None, "is built for the CPU: install a build for CUDA 13.0"),
        ((12, 8), "13.0", "the driver runs up to 12.8: update the driver"),
        ((13, 0), "12.6", "torch.cuda.init()"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_a_fault(
    driver: tuple[int, int] | None, torch_cuda: str | None, advice: str
) -> None:
    found = no_gpu(has_device=True, driver=driver, torch_cuda=torch_cuda, torch_version="2.13")
    assert found.state == "fault"
    assert advice in found.advice


def test_a_ptxas_that_is_newer_than_the_driver_is_a_fault_that_names_the_variable() -> None:
    assert judge_ptxas(PTXAS, (12, 8), (13, 0), {}).state == "ok"
    assert judge_ptxas(PTXAS, (12, 9), (12, 4), {}).state == "ok"
    found = judge_ptxas(PTXAS, (13, 1), (12, 8), {})
    assert found.state == "fault"
    assert "TRITON_PTXAS_PATH=/usr/local/cuda-12.8/bin/ptxas" in found.advice
    others = {Path("/usr/local/cuda-12.4/bin/ptxas"): (12, 4), Path("/usr/local/cuda-13.2/bin/ptxas"): (13, 2)}
    found = judge_ptxas(PTXAS, (13, 1), (12, 8), others)
    assert "TRITON_PTXAS_PATH=/usr/local/cuda-12.4/bin/ptxas" in found.advice


def test_a_ptxas_that_is_missing_or_broken_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "ptxas"))
    found = check_ptxas((13, 0))
    assert (found.state, found.text) == ("fault", f"TRITON_PTXAS_PATH={tmp_path}/ptxas is missing")
    (tmp_path / "ptxas").touch(mode=0o644)
    assert check_ptxas((13, 0)).text == f"{tmp_path}/ptxas does not run"


@pytest.mark.parametrize(
    ("output", "advice"),
    [
        ("RuntimeError: Triton Error [CUDA]: device kernel image is invalid", "TRITON_PTXAS_PATH"),
        ("ptxas fatal   : Unsupported .version 9.1; current version is '8.7'", "TRITON_PTXAS_PATH"),
        ("fatal error: Python.h: No such file or directory", "python3-dev"),
        ("Killed", "kernel_probe"),
    ],
)
def test_a_kernel_that_fails_is_explained(output: str, advice: str) -> None:
    found = judge_kernel(1, f"Traceback (most recent call last):\n{output}\n")
    assert found.state == "fault"
    assert output in found.text
    assert advice in found.advice


@pytest.mark.gpu
def test_the_trap_is_named_where_a_kernel_meets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_kernel().state == "ok"
    broken = tmp_path / "ptxas"
    said = "Cuda compilation tools, release 12.8, V12.8.61"  # Triton leaves out one that does not say its version
    broken.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo '{said}' && exit\necho 'ptxas fatal' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(broken))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    found = check_kernel()
    assert found.state == "fault"
    assert "TRITON_PTXAS_PATH" in found.advice
