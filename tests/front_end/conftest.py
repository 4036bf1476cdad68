"""A front end as in Triton's stub, with an engine that the test plays."""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from limpet.backend.checkpoint import FORMAT_VERSION, CheckpointDir, GenerationDefaults, Manifest, TokenizerConfig
from limpet.backend.config import EngineConfig
from limpet.backend.link.connection import EngineConnection
from limpet.backend.link.keeper import EngineKeeper
from limpet.backend.link.messages import (
    BeginTurn,
    FinishReason,
    Hello,
    ModelInfo,
    Outputs,
    Submit,
    TokenOutput,
    TurnBegun,
)
from limpet.backend.link.ownership import EngineRuntime
from limpet.backend.tokenizer import Tokenizer
from tests.front_end import fake_triton
from tests.front_end.fake_engine import FakeEngine
from tests.front_end.fake_triton import FakeRequest, FakeSender
from tests.front_end.sample_templates import CHATML
from tests.front_end.sample_tokenizers import BOS, EOS, byte_level

fake_triton.install()
DIGEST = "digest"


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """LIMPET_RUNTIME_DIR names an empty folder with a short path: Unix sockets stand in it."""
    with tempfile.TemporaryDirectory(prefix="lt-", dir="/tmp") as folder:
        monkeypatch.setenv("LIMPET_RUNTIME_DIR", folder)
        yield


@pytest.fixture
def runtime(tmp_path: Path, runtime_dir: None) -> EngineRuntime:
    runtime = EngineRuntime.for_model(tmp_path, os.getpid())
    runtime.prepare()
    return runtime


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A converted model without weights."""
    checkpoint = CheckpointDir(tmp_path / "model")
    checkpoint.folder.mkdir(parents=True)
    byte_level().backend.save(str(checkpoint.tokenizer_path))
    config = TokenizerConfig(bos_token=BOS, eos_token=EOS, generation=GenerationDefaults(temperature=0.5))
    checkpoint.tokenizer_config_path.write_bytes(msgspec.json.encode(config))
    checkpoint.chat_template_path.write_text(CHATML, "utf-8")
    manifest = Manifest(format_version=FORMAT_VERSION, limpet_version="0", source="test", num_parameters=0, files={})
    checkpoint.manifest_path.write_bytes(msgspec.json.encode(manifest))
    return checkpoint.root


@dataclass
class Stage:
    """Front end and engine; the test asks like a client and answers like an engine."""

    front_end: Any
    engine: FakeEngine
    tokenizer: Tokenizer

    def ask(self, text: str | None = "Hi", *, session: int | str = 0, flags: int = 0, **values: Any) -> FakeSender:
        """Start a request."""
        parameters = values.pop("parameters", {})
        given = values if text is None else {"text_input": text, **values}
        request = FakeRequest(given, parameters, session, flags)
        self.front_end.accept(request)
        return request.sender

    def submitted(self) -> Submit:
        """The request has reached the engine."""
        return self.engine.expect(Submit)

    def turn_submitted(self, history_len: int = 0) -> Submit:
        """The first turn of a session has reached the engine."""
        begin = self.engine.expect(BeginTurn)
        self.engine.send(TurnBegun(begin.key, history_len, b"", []))
        return self.submitted()

    def generate(self, key: int, text: str = "", reason: FinishReason | None = None, ids: Any = None) -> list[int]:
        """Tokens of one step, as the engine would send them."""
        generated = self.tokenizer.encode_segment(text) if ids is None else list(ids)
        self.engine.send(Outputs([TokenOutput(key, generated, reason, num_cached_tokens=3)]))
        return generated


@pytest.fixture
def stage(runtime: EngineRuntime, model_dir: Path) -> Iterator[Stage]:
    from limpet.backend.front_end.front_end import FrontEnd

    tokenizer = byte_level()
    info = ModelInfo(
        engine_pid=os.getpid(),
        session_len=200,
        vocab_size=tokenizer.vocab_size,
        max_batch_size=4,
        eos_token_ids=[tokenizer.special_id(EOS) or 0],
    )
    engine = FakeEngine(runtime, DIGEST, info)
    engine.start()
    keeper = EngineKeeper(runtime, DIGEST, lambda: pytest.fail("the engine is there"))
    connection = EngineConnection(runtime, keeper, Hello("test", os.getpid(), "front_end"))
    front_end = FrontEnd(model_dir, EngineConfig(), connection)
    connection.start()
    connection.wait_ready()
    yield Stage(front_end, engine, tokenizer)
    front_end.stop()
    engine.await_bye()
    engine.expect_nothing()
    engine.stop()
