"""What all installed commands have in common."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

# For each command a library that it imports early, and one that it imports late.
LIBRARIES = {
    "limpet-api": ("grpc", "fastapi.routing"),
    "limpet-bench": ("grpc", "rich.progress"),
    "limpet-chat": ("grpc", "tritonclient.grpc"),
    "limpet-convert": ("torch", "transformers"),
    "limpet-doctor": ("grpc", "tritonclient.grpc"),
    "limpet-ready": ("grpc", "tritonclient.grpc"),
    "limpet-sessions": ("grpc", "tritonclient.grpc"),
    "limpet-serve": ("grpc", "tritonclient.grpc"),
    "limpet-webui": ("grpc", "gradio.components"),
}

ARGUMENTS = {"limpet-serve": ["--model-repository=nothing"], "limpet-bench": ["serving", "127.0.0.1:1"]}

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def test_every_command_is_tried_here() -> None:
    assert set(re.findall(r"^(limpet-\w+) = ", PYPROJECT.read_text("utf-8"), re.MULTILINE)) == set(LIBRARIES)


@pytest.mark.parametrize("command", LIBRARIES)
@pytest.mark.parametrize("when", [0, 1], ids=["early", "late"])
def test_ctrl_c_during_the_imports_ends_a_command_without_a_traceback(command: str, when: int, tmp_path: Path) -> None:
    path = Path(sys.executable).with_name(command)
    arguments = ARGUMENTS.get(command, ["127.0.0.1:1"])
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", path, *arguments], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stderr is not None
    with process.stderr as lines:
        # Python reports every import there: "import time: 12 | 345 |   numpy.linalg"
        assert any(line.rpartition("|")[2].strip() == LIBRARIES[command][when] for line in lines)
        process.send_signal(signal.SIGINT)
        rest = lines.read()
    assert process.wait(60) in (-signal.SIGINT, 130)
    assert "Traceback" not in rest


def test_ctrl_c_ends_a_wait_without_a_traceback() -> None:
    path = Path(sys.executable).with_name("limpet-ready")
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        process = subprocess.Popen([path, address, "--timeout=60"], stderr=subprocess.PIPE, text=True)
        deaf.accept()  # so it waits for an answer
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == ""


def test_packages_that_are_not_installed_are_named() -> None:
    code = "import sys; sys.modules['gradio'] = None; from limpet.commands.entry_points import webui; sys.exit(webui())"
    run = subprocess.run([sys.executable, "-c", code, "127.0.0.1:1"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert run.stderr == "The package gradio is missing. Install what it takes: pip install 'limpet[webui]'\n"
