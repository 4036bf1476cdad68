"""limpet_admin against engines played by the test."""

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from limpet.backend.chat_template import ChatTemplate
from limpet.backend.front_end.errors import RequestError
from limpet.backend.link.messages import Admin, AdminReply, Bye, Failed, Hello, Message, ModelInfo, Ping
from limpet.backend.link.ownership import EngineRuntime
from tests.front_end.fake_engine import FakeEngine
from tests.front_end.fake_triton import FakeRequest
from tests.front_end.sample_templates import CHATML
from tests.front_end.sample_tokenizers import byte_level

INFO = ModelInfo(engine_pid=1, session_len=8, vocab_size=8, max_batch_size=1, eos_token_ids=[])
Answer = Callable[[Admin], Message]


@pytest.fixture
def repository(tmp_path: Path, runtime_dir: None) -> Path:
    """Of limpet_admin and the models alpha and beta."""
    for name in ("alpha", "beta"):
        folder = tmp_path / "repository" / name / "1" / "checkpoint"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    (tmp_path / "repository" / "limpet_admin" / "1").mkdir(parents=True)
    return tmp_path / "repository"


def reply(**result: Any) -> Answer:
    return lambda admin: AdminReply(admin.key, json.dumps(result))


@contextmanager
def engine(repository: Path, name: str, answer: Answer) -> Iterator[list[Admin]]:
    """A running engine that answers one operation; the list holds what it was asked."""
    runtime = EngineRuntime.for_model(repository / name, os.getpid())
    fake = FakeEngine(runtime, "digest", INFO)
    fake.start()
    asked: list[Admin] = []

    def serve() -> None:
        asked.append(fake.expect(Admin))
        fake.send(answer(asked[0]))
        fake.expect(Bye)

    thread = threading.Thread(target=serve)
    thread.start()
    yield asked
    thread.join()
    assert [hello.role for hello in fake.hellos] == ["admin"]
    fake.stop()


def run(repository: Path, request: Any) -> dict[str, Any]:
    """The answer of an operation, or code and text of its refusal."""
    from limpet.backend.front_end.admin import Administration

    administration = Administration(repository, os.getpid(), Hello("limpet_admin_0", os.getpid(), "admin"))
    source = request if isinstance(request, (bytes, str)) else json.dumps(request)
    try:
        return administration.run(source if isinstance(source, bytes) else source.encode())
    except RequestError as refusal:
        return {"code": refusal.code, "error": refusal.message}
    finally:
        administration.stop()


def test_status_is_ready_when_every_engine_is(repository: Path) -> None:
    with engine(repository, "alpha", reply(ready=True, steps=4)), engine(repository, "beta", reply(ready=True)):
        status = run(repository, {"op": "status"})
    assert status == {"ready": True, "models": {"alpha": {"ready": True, "steps": 4}, "beta": {"ready": True}}}


def test_triton_gets_one_string_or_an_error_with_its_code(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from limpet.backend.front_end.admin import TritonPythonModel

    monkeypatch.setattr(os, "getppid", os.getpid)  # the stub's parent is tritonserver
    model = TritonPythonModel()
    model.initialize({"model_repository": str(repository / "limpet_admin"), "model_instance_name": "limpet_admin_0"})
    requests = [FakeRequest({"request": source}) for source in ('{"op": "status"}', "{")]
    model.execute(requests)
    responses = [response for request in requests for response in request.sender.all()]
    model.finalize()
    assert json.loads(responses[0].outputs["response"][0])["ready"] is False
    assert responses[1].error is not None
    assert responses[1].error.code == "INVALID_ARG"


@pytest.fixture
def with_tokenizer(repository: Path, model_dir: Path) -> Path:
    """Its model alpha has a tokenizer and a template, its alias ensemble stands for it."""
    shutil.copytree(model_dir, repository / "alpha", dirs_exist_ok=True)
    (repository / "ensemble").mkdir()
    parameters = 'parameters { key: "alias_of" value { string_value: "alpha" } }'
    (repository / "ensemble" / "config.pbtxt").write_text(parameters)
    return repository


@pytest.mark.parametrize("model", ["alpha", "ensemble"])
def test_tokenize_gives_the_ids_of_the_prompt_and_detokenize_the_text(with_tokenizer: Path, model: str) -> None:
    tokenizer, text = byte_level(), "Größe 🦁 <|im_end|>"
    answer = run(with_tokenizer, {"op": "tokenize", "model": model, "text": text})
    assert answer == {"ids": tokenizer.encode_prompt(text), "num_tokens": len(tokenizer.encode_prompt(text))}
    ids = [*answer["ids"], 10**6]
    assert run(with_tokenizer, {"op": "detokenize", "model": model, "ids": ids})["text"] == tokenizer.decode(ids)


def test_tokenize_of_messages_applies_the_template(with_tokenizer: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    template = ChatTemplate(CHATML, byte_level().config)
    answer = run(with_tokenizer, {"op": "tokenize", "model": "alpha", "messages": messages})
    assert answer["ids"] == byte_level().with_bos(byte_level().encode_segment(template.render(messages)))


@pytest.mark.parametrize(
    ("request_of", "word"),
    [
        ({"op": "tokenize"}, "text"),
        ({"op": "tokenize", "text": "a", "messages": []}, "either"),
        ({"op": "tokenize", "text": 3}, "string"),
        ({"op": "tokenize", "text": "a" * 1_000_001}, "1000000"),
        ({"op": "tokenize", "messages": [{"role": "user"}]}, "content"),
        ({"op": "detokenize", "ids": "1"}, "ids"),
        ({"op": "detokenize", "ids": [True]}, "ids"),
        ({"op": "detokenize", "ids": [-1]}, "0"),
    ],
)
def test_texts_and_ids_that_are_none_are_refused(with_tokenizer: Path, request_of: dict[str, Any], word: str) -> None:
    answer = run(with_tokenizer, {"model": "alpha", **request_of})
    assert answer["code"] == "INVALID_ARG"
    assert word in answer["error"]


def test_status_names_the_engine_that_is_not_there(repository: Path) -> None:
    with engine(repository, "alpha", reply(ready=True)):
        status = run(repository, {"op": "status"})
    assert not status["ready"]
    assert status["models"]["alpha"]["ready"]
    assert status["reason"] == status["models"]["beta"]["reason"] == "The engine of beta is not running."


def test_status_does_not_wait_for_an_engine_that_is_starting(repository: Path) -> None:
    runtime = EngineRuntime.for_model(repository / "alpha", os.getpid())
    assert runtime.take_lock("digest")
    shutil.rmtree(repository / "beta")
    status = run(repository, {"op": "status"})
    assert not status["ready"]
    assert status["reason"] == "The engine of alpha is still starting."


def test_status_gives_up_on_an_engine_that_does_not_answer(repository: Path) -> None:
    shutil.rmtree(repository / "beta")
    with engine(repository, "alpha", lambda admin: Ping()):
        assert run(repository, {"op": "status"})["reason"] == "The engine of alpha did not answer within 0.9 s."


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"draining": True}, "The engine is stopping."),
        ({"draining": False}, "The engine makes no progress."),
        ({"reason": "Because."}, "Because."),
    ],
)
def test_status_says_why_an_engine_is_not_ready(repository: Path, state: dict[str, Any], reason: str) -> None:
    shutil.rmtree(repository / "beta")
    with engine(repository, "alpha", reply(ready=False, **state)):
        assert run(repository, {"op": "status"})["reason"] == reason


def test_operations_go_to_the_model_that_they_name(repository: Path) -> None:
    with engine(repository, "beta", reply(cancelled=1)) as asked:
        assert run(repository, {"op": "cancel", "model": "beta", "request_id": "r", "admin_key": "k"}) == {
            "cancelled": 1
        }
    assert (asked[0].op, json.loads(asked[0].arguments)) == ("cancel", {"request_id": "r", "admin_key": "k"})


def test_with_one_model_its_name_may_be_left_out(repository: Path) -> None:
    shutil.rmtree(repository / "beta")
    with engine(repository, "alpha", reply(cancelled=0)):
        assert run(repository, {"op": "cancel", "session_id": "s"}) == {"cancelled": 0}


def test_with_several_models_an_operation_names_one(repository: Path) -> None:
    answer = run(repository, {"op": "cancel", "session_id": "s"})
    assert answer == {"code": "INVALID_ARG", "error": "op cancel needs a model: one of alpha, beta."}


def test_drain_adds_up_what_still_runs(repository: Path) -> None:
    with engine(repository, "alpha", reply(requests=2)), engine(repository, "beta", reply(requests=3)):
        assert run(repository, {"op": "drain"}) == {"requests": 5}


def test_drain_passes_over_engines_that_are_not_there(repository: Path) -> None:
    with engine(repository, "alpha", reply(requests=2)):
        assert run(repository, {"op": "drain"}) == {"requests": 2}


def test_a_refusal_of_the_engine_keeps_its_code(repository: Path) -> None:
    with engine(repository, "alpha", lambda admin: Failed(admin.key, "NOT_FOUND", "No such session.")):
        answer = run(repository, {"op": "sessions", "model": "alpha"})
    assert answer == {"code": "NOT_FOUND", "error": "No such session."}


@pytest.mark.parametrize(
    ("request_of", "code", "words"),
    [
        ("{", "INVALID_ARG", "valid JSON"),
        (b"\xff", "INVALID_ARG", "valid JSON"),
        ("[]", "INVALID_ARG", "JSON object"),
        ({}, "INVALID_ARG", "needs an op"),
        ({"op": "status", "model": "gamma"}, "NOT_FOUND", "known are alpha, beta"),
        ({"op": "status", "model": ["alpha"]}, "NOT_FOUND", "known are alpha, beta"),
    ],
)
def test_a_wrong_request_is_refused_in_one_sentence(repository: Path, request_of: Any, code: str, words: str) -> None:
    answer = run(repository, request_of)
    assert answer["code"] == code
    assert words in answer["error"]
