"""Every kernel compiles for an H200, on machines without a GPU too."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED_BYTES = 227 << 10  # of an H200's multiprocessor, for one program


def test_every_kernel_compiles_and_fits(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for_gpu"],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    compiled = {name: int(size) for name, size in re.findall(r"^(\w+) (\d+)$", found.stdout, re.MULTILINE)}
    sources = "\n".join(path.read_text("utf-8") for path in (ROOT / "kernels").glob("*.py"))
    assert set(compiled) == set(re.findall(r"^def (_\w+_kernel)\(", sources, re.MULTILINE))
    assert max(compiled.values()) <= SHARED_BYTES
