import os
import subprocess
import sys
from pathlib import Path

import pytest

from limpet.backend.serve import installation
from limpet.backend.serve.errors import RefusedError

LIBPYTHON = f"libpython3.{sys.version_info.minor}.so.1.0"


def test_tritonserver_on_path_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "tritonserver"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = installation.find_installation(tmp_path)
    assert found.command(["--id=x"]) == [str(binary), "--id=x"]


def test_wheel_is_linked_into_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    found = installation.find_installation(tmp_path)
    assert found.backends == tmp_path / "backends"
    stub = found.backends / "python" / "triton_python_backend_stub"
    assert f"/3.{sys.version_info.minor}/" in str(stub.resolve(strict=True))
    version = subprocess.run(found.command(["--help"]), env=dict(found.environment), capture_output=True, check=False)
    assert b"Usage: tritonserver" in version.stdout + version.stderr


def test_stub_sees_this_python_and_its_own_libpython(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/first")
    environment = installation.find_installation(tmp_path).environment
    assert environment["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    loader = environment["LD_LIBRARY_PATH"].split(":")
    assert loader[-1] == "/opt/first"
    if own := installation.libpython_folder():
        assert loader[0] == own
        assert (Path(own) / LIBPYTHON).exists()


def test_stub_that_cannot_link_is_refused_with_the_library_and_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = LIBPYTHON.replace("libpython3", "libpythoX3")
    root = _copy_of_the_wheel(tmp_path, LIBPYTHON, broken)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(installation, "_wheel_root", lambda: root)
    with pytest.raises(RefusedError, match=f"{broken}.*apt-get install libpython3"):
        installation.find_installation(tmp_path)


def test_python_without_a_stub_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(installation, "_VERSION", "3.14")
    with pytest.raises(RefusedError, match=r"Python 3\.14: use 3\.10 to 3\.12"):
        installation.find_installation(tmp_path)


def _copy_of_the_wheel(folder: Path, library: str, renamed: str) -> Path:
    """The wheel's files, but its stub asks for a library that nobody has."""
    real = installation._wheel_root()
    root = folder / "pytriton" / "tritonserver"
    stub = Path("python_backend_stubs") / f"3.{sys.version_info.minor}" / "triton_python_backend_stub"
    (root / stub).parent.mkdir(parents=True)
    (root / stub).write_bytes((real / stub).read_bytes().replace(library.encode(), renamed.encode()))
    (root / stub).chmod(0o755)
    (root / "backends").symlink_to(real / "backends")
    (root / "bin").symlink_to(real / "bin")
    (folder / "nvidia_pytriton.libs").symlink_to(real.parent.parent / "nvidia_pytriton.libs")
    return root
