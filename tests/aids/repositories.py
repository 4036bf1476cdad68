"""Converted models for tests: made once by the real converter, kept in .cache/ until the converter changes."""

import fcntl
import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from limpet.backend.config import EngineConfig
from limpet.converter.convert import convert
from limpet.converter.plan import Options, make_plan
from tests.aids.chain_checkpoint import write_chain_huggingface
from tests.aids.tiny import write_tiny

ROOT = Path(__file__).parents[2]
SMOLLM2_GGUF = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2, CHAIN = "smollm2", "chain"
# Written into config.pbtxt; small caches, so that several servers fit beside each other on a small machine.
SMOLLM2_ENGINE = EngineConfig(max_batch_size=32, cache_bytes=768 << 20)
CHAIN_ENGINE = EngineConfig(max_batch_size=64, cache_bytes=64 << 20)
TINY = "tiny"
TINY_BLOCK_BYTES = 2 * 2 * 2 * 8 * 16 * 4  # K and V, layers, K/V heads, head_dim, tokens, float32
# 36 blocks of 16 tokens: a few sessions, then the oldest must go.
TINY_ENGINE = EngineConfig(
    max_batch_size=16, cache_block_seq_len=16, cache_bytes=36 * TINY_BLOCK_BYTES, max_prefill_token_num=32
)
_CONVERTER_SOURCES = (
    "converter/*.py",
    "backend/checkpoint.py",
    "backend/config.py",
    "model_repository/**/*.*",
    "tests/aids/chain*.py",
    "tests/aids/tiny.py",
)
_FORGET_AFTER_S = 900.0


def smollm2_repository() -> Path:
    """A model repository with SmolLM2 (name `smollm2`) and limpet_admin; raises FileNotFoundError without the GGUF."""
    if not SMOLLM2_GGUF.exists():
        raise FileNotFoundError(f"{SMOLLM2_GGUF.relative_to(ROOT)} is missing: `make test` downloads it.")
    return _converted(SMOLLM2, lambda scratch: SMOLLM2_GGUF, SMOLLM2_ENGINE)


def chain_repository() -> Path:
    """A model repository with the chain checkpoint (name `chain`) and limpet_admin."""

    def write(scratch: Path) -> Path:
        write_chain_huggingface(scratch / CHAIN)
        return scratch / CHAIN

    return _converted(CHAIN, write, CHAIN_ENGINE)


def tiny_repository() -> Path:
    """A model repository with the random model of `build_tiny()` (name `tiny`), short of memory, and limpet_admin."""

    def write(scratch: Path) -> Path:
        write_tiny(scratch / TINY)
        return scratch / TINY

    return _converted(TINY, write, TINY_ENGINE)


def _converted(name: str, write_source: Callable[[Path], Path], engine: EngineConfig) -> Path:
    kept = ROOT / ".cache" / "test-models" / name
    workspace = kept / _digest(engine)
    with _locked(kept):
        if not (workspace / "done").exists():
            _forget_old(kept)
            shutil.rmtree(workspace, ignore_errors=True)
            source = write_source(workspace / "source")
            options = Options(source=source, workspace=workspace, name=name, engine=engine)
            convert(make_plan(options), lambda num_bytes: None)
        (workspace / "done").touch()
    return workspace / "model_repository"


def _digest(engine: EngineConfig) -> str:
    """Digest of all that a conversion depends on, but for the GGUF file, which never changes."""
    digest = hashlib.sha256(msgspec.json.encode(engine))
    for pattern in _CONVERTER_SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            if path.suffix != ".pyc":
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time: others wait for the conversion instead of doing it again."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _forget_old(folder: Path) -> None:
    """Remove conversions by earlier converters that no test run has used of late."""
    for mark in folder.glob("*/done"):
        if time.time() - mark.stat().st_mtime > _FORGET_AFTER_S:
            shutil.rmtree(mark.parent)
