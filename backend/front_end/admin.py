"""limpet_admin: JSON in, JSON out, for the engines of all models of this repository. It never starts an engine."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from limpet.backend.checkpoint import CheckpointDir
from limpet.backend.config import ALIAS_OF, read_parameters
from limpet.backend.front_end.errors import RequestError, coded_text
from limpet.backend.front_end.metrics_publisher import MetricsPublisher
from limpet.backend.front_end.model import prepare_process, shm_region
from limpet.backend.front_end.text_ops import TEXT_OPS, TextOps
from limpet.backend.link.admin_links import AdminLinks
from limpet.backend.link.messages import AdminReply, Failed, Hello
from limpet.backend.link.ownership import EngineRuntime, OwnershipError

_STATUS_TIMEOUT_S = 0.9  # a probe waits one second
_TIMEOUT_S = 10.0
_NUM_WORKERS = 4
_OPS_FOR_ALL = ("status", "drain")  # without a model they go to every engine
_logger = logging.getLogger(__name__)


class TritonPythonModel:
    """Triton's callbacks of the model limpet_admin, which is not decoupled."""

    def initialize(self, args: Mapping[str, str]) -> None:
        prepare_process()
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, "limpet-admin")
        hello = Hello(front_end=args["model_instance_name"], pid=os.getpid(), role="admin", shm_region=shm_region())
        self._administration = Administration(Path(args["model_repository"]).parent, os.getppid(), hello)
        self._publisher = MetricsPublisher(self._administration.metrics)

    def execute(self, requests: Sequence[Any]) -> None:
        """Answers come from the workers: an operation that takes long does not hold up `status`."""
        for request in requests:
            source = pb_utils.get_input_tensor_by_name(request, "request").as_numpy().reshape(-1)[0]
            self._workers.submit(self._respond, source, request.get_response_sender())

    def finalize(self) -> None:
        """Called once, when the server stops."""
        self._workers.shutdown()
        self._publisher.stop()
        self._administration.stop()

    def _respond(self, source: bytes, sender: Any) -> None:
        sender.send(self._answer(source), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _answer(self, source: bytes) -> Any:
        try:
            answer = json.dumps(self._administration.run(source), ensure_ascii=False).encode()
            tensor = pb_utils.Tensor("response", np.array([answer], dtype=np.object_))
            return pb_utils.InferenceResponse(output_tensors=[tensor])
        except RequestError as refusal:
            return _failure(refusal)
        except Exception:
            _logger.exception("An operation failed.")
            return _failure(RequestError("The operation failed; the server's log says why.", "INTERNAL"))


def _failure(refusal: RequestError) -> Any:
    text = coded_text(refusal.code, refusal.message)
    error = pb_utils.TritonError(text, getattr(pb_utils.TritonError, refusal.code))
    return pb_utils.InferenceResponse(output_tensors=[], error=error)


class Administration:
    """Runs operations on the engines that serve a repository for one tritonserver."""

    def __init__(self, repository: Path, server_pid: int, hello: Hello) -> None:
        self._repository = repository
        self._server_pid = server_pid
        self._runtimes: dict[Path, EngineRuntime] = {}
        self._text_ops: dict[str, TextOps] = {}
        self._links = AdminLinks(hello)
        self._links.connect(self._engines())

    def stop(self) -> None:
        """Leave the engines."""
        self._links.stop()

    def run(self, source: bytes) -> dict[str, Any]:
        """The answer to a JSON object with `op`; raises RequestError."""
        request = _parse(source)
        op, model = request.pop("op", None), request.pop("model", None)
        if not isinstance(op, str):
            raise RequestError('The request needs an op, such as {"op": "status"}.')
        engines = self._engines()
        model = self._own_name(model, engines)
        if model is None and len(engines) != 1 and op not in _OPS_FOR_ALL:
            raise RequestError(f"op {op} needs a model: one of {', '.join(engines)}.")
        chosen = engines if model is None else {model: engines[model]}
        if op in TEXT_OPS:
            return self._texts(next(iter(chosen))).run(op, request)
        timeout_s = _STATUS_TIMEOUT_S if op == "status" else _TIMEOUT_S
        answers = self._links.call(chosen, op, json.dumps(request), timeout_s)
        if op == "status":
            return _status(answers)
        if op == "drain":
            return _drained(answers)
        return _reply(next(iter(answers.values())))

    def metrics(self) -> Mapping[str, AdminReply | Failed]:
        """Every engine's answer to op `metrics`."""
        return self._links.call(self._engines(), "metrics", "{}", _STATUS_TIMEOUT_S)

    def _own_name(self, model: Any, engines: Mapping[str, EngineRuntime]) -> str | None:
        """The name of a model with an engine: an alias stands for the one that it names."""
        if model is None or (isinstance(model, str) and model in engines):
            return model
        if isinstance(model, str) and (self._repository / Path(model).name / "config.pbtxt").is_file():
            target = read_parameters(self._repository / Path(model).name).get(ALIAS_OF)
            if target in engines:
                return target
        raise RequestError(f"There is no model {model!r}; known are {', '.join(engines)}.", "NOT_FOUND")

    def _texts(self, model: str) -> TextOps:
        if model not in self._text_ops:
            self._text_ops[model] = TextOps(self._repository / model)
        return self._text_ops[model]

    def _engines(self) -> dict[str, EngineRuntime]:
        folders = sorted(self._repository.iterdir())
        served = [folder for folder in folders if CheckpointDir(folder).manifest_path.is_file()]
        return {folder.name: self._runtime(folder) for folder in served}

    def _runtime(self, folder: Path) -> EngineRuntime:
        if folder not in self._runtimes:
            try:
                self._runtimes[folder] = EngineRuntime.for_model(folder, self._server_pid)
            except OwnershipError as error:
                raise RequestError(str(error), "UNAVAILABLE") from None
        return self._runtimes[folder]


def _parse(source: bytes) -> dict[str, Any]:
    try:
        request = json.loads(source.decode())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The request is no valid JSON: {error}.") from None
    if not isinstance(request, dict):
        raise RequestError('The request must be a JSON object, such as {"op": "status"}.')
    return request


def _reply(answer: AdminReply | Failed) -> dict[str, Any]:
    if isinstance(answer, Failed):
        raise RequestError(answer.message, answer.code)
    reply: dict[str, Any] = json.loads(answer.result)
    return reply


def _status(answers: Mapping[str, AdminReply | Failed]) -> dict[str, Any]:
    """Each model's state; `ready` if all are, else with the first one's reason."""
    models = {name: _model_status(answer) for name, answer in answers.items()}
    reasons = [status["reason"] for status in models.values() if not status["ready"]]
    if not models:
        reasons = ["The repository has no model."]
    return {"ready": not reasons, "models": models, **({"reason": reasons[0]} if reasons else {})}


def _model_status(answer: AdminReply | Failed) -> dict[str, Any]:
    if isinstance(answer, Failed):
        return {"ready": False, "reason": answer.message}
    status: dict[str, Any] = json.loads(answer.result)
    if not status["ready"]:
        stopping = "The engine is stopping." if status.get("draining") else "The engine makes no progress."
        status.setdefault("reason", stopping)
    return status


def _drained(answers: Mapping[str, AdminReply | Failed]) -> dict[str, Any]:
    """Requests that are still running in all engines; one that is not there has none."""
    return {"requests": sum(_reply(each)["requests"] for each in answers.values() if not _is_gone(each))}


def _is_gone(answer: AdminReply | Failed) -> bool:
    return isinstance(answer, Failed) and answer.code == "UNAVAILABLE"
