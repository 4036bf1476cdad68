"""SmolLM2 with all its aliases, served for clients that others wrote; each runs in its own environment."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from limpet.backend.checkpoint import CheckpointDir
from limpet.client import Client
from limpet.converter.aliases import parse_aliases, write_alias
from tests.aids.live_server import LiveServer, live_server
from tests.clients.environments import environment

PROGRAMS = Path(__file__).parent / "programs"
CLIENT_S = 240
Run: TypeAlias = Callable[..., str]


@pytest.fixture(scope="session")
def repository(smollm2_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's repository with every alias; the weights are the same files."""
    copy = smollm2_repository.parent / "with-aliases"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(smollm2_repository, copy, copy_function=os.link)
    for alias in parse_aliases(("trtllm", "trtllm-u32", "infer"), "smollm2"):
        write_alias(copy, alias, "smollm2")
    return copy


@pytest.fixture(scope="session")
def server(repository: Path) -> Iterator[LiveServer]:
    with live_server(repository, ["--drain-deadline=5"]) as server:
        server.wait_ready()
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="session")
def expected(server: LiveServer) -> Callable[[str, int], str]:
    """What a raw prompt's greedy answer is, asked with our own client."""

    def ask(prompt: str, max_tokens: int) -> str:
        with Client(server.target) as client:
            return client.generate(prompt, max_tokens=max_tokens, temperature=0).text

    return ask


@pytest.fixture
def tokenizer_folder(repository: Path, tmp_path: Path) -> Path:
    """SmolLM2's tokenizer and template as Hugging Face's library loads them."""
    checkpoint = CheckpointDir(repository / "smollm2")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    shutil.copyfile(checkpoint.tokenizer_path, folder / "tokenizer.json")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": checkpoint.chat_template(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a command of a client's environment in an empty folder; its standard output."""

    def run(client: str, command: str, *arguments: str, succeeds: bool = True) -> str:
        binaries = environment(client)
        variables = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "HOME": str(tmp_path)}
        done = subprocess.run(
            [binaries / command, *arguments],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=CLIENT_S,
            check=False,
        )
        assert (done.returncode == 0) == succeeds, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    return run


@pytest.fixture
def run_program(run: Run) -> Callable[..., Any]:
    """Runs programs/CLIENT.py in the client's environment; the JSON of its last line."""

    def run_it(client: str, *arguments: str) -> Any:
        program = PROGRAMS / f"{client.replace('-', '_')}_client.py"
        return json.loads(run(client, "python", str(program), *arguments).splitlines()[-1])

    return run_it
