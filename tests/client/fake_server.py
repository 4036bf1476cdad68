"""A Triton server in this process that answers as a test says, over real gRPC."""

import json
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import model_config_pb2 as config_pb
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

Response = pb.ModelStreamInferResponse
MODEL = "tiny"


@dataclass
class Asked:
    """One request as the server saw it, its tensors read."""

    model: str
    request_id: str
    inputs: dict[str, Any]
    parameters: dict[str, Any]
    gone: threading.Event = field(default_factory=threading.Event)  # set when the RPC has ended

    @property
    def options(self) -> dict[str, Any]:
        return dict(json.loads(self.inputs.get("sampling_parameters", "{}")))

    @property
    def messages(self) -> list[dict[str, Any]]:
        return list(json.loads(self.inputs["messages"]))


Answer = Callable[[Asked], Iterator[Response]]


def read_request(request: pb.ModelInferRequest) -> Asked:
    """Independent of the client's code: every tensor must be well-formed."""
    inputs: dict[str, Any] = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            assert list(tensor.shape) == [1]
            assert struct.unpack("<I", raw[:4])[0] == len(raw) - 4
            inputs[tensor.name] = raw[4:].decode("utf-8")
        elif tensor.datatype == "BOOL":
            assert list(tensor.shape) == [1]
            inputs[tensor.name] = {b"\0": False, b"\1": True}[raw]
        else:
            values = np.frombuffer(raw, {"INT32": "<i4"}[tensor.datatype])
            assert list(tensor.shape) == [len(values)]
            inputs[tensor.name] = values.tolist()
    parameters = {
        name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in request.parameters.items()
    }
    return Asked(request.model_name, request.id, inputs, parameters)


def data(
    text: str,
    finish: str | None = None,
    *,
    ids: tuple[int, ...] | None = None,
    num_input: int = 3,
    num_cached: int = 0,
    num_dropped: int = 0,
    session_tokens: int | None = None,
    **logprobs: Any,
) -> Response:
    """A data response as the front end sends it; with `finish` it is the final one.

    `logprobs` and `prompt_logprobs` are what stands in the outputs of these names.
    """
    ids = tuple(range(len(text))) if ids is None else ids
    response = Response()
    inner = response.infer_response
    _add(inner, "text_output", "BYTES", _string(text))
    _add(inner, "finish_reason", "BYTES", _string(finish or "None"))
    _add(inner, "output_ids", "INT32", np.array(ids, "<i4").tobytes())
    counts = {"num_input_tokens": num_input, "num_cached_tokens": num_cached, "num_output_tokens": len(ids)}
    if session_tokens is not None:
        counts["session_tokens"] = session_tokens
    if num_dropped:
        counts["num_dropped_turns"] = num_dropped
    for name, count in counts.items():
        _add(inner, name, "UINT32", np.array([count], "<u4").tobytes())
    for name, listed in logprobs.items():
        _add(inner, name, "BYTES", _string(json.dumps(listed)))
    inner.parameters["triton_final_response"].bool_param = finish is not None
    return response


def error(message: str) -> Response:
    """An error response, as tritonserver renders a TritonError."""
    response = Response(error_message=message)
    response.infer_response.parameters["triton_final_response"].bool_param = True
    return response


def _string(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode()


def _add(response: pb.ModelInferResponse, name: str, datatype: str, raw: bytes) -> None:
    response.outputs.add(name=name, datatype=datatype, shape=[1])
    response.raw_output_contents.append(raw)


def say_hello(asked: Asked) -> Iterator[Response]:
    """The default answer."""
    yield data("Hello ")
    yield data("world", "stop")


class FakeServer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers by `answer` and `admin`, which a test may replace at any time; `asked` keeps what was asked."""

    def __init__(self, port: int = 0) -> None:
        self.answer: Answer = say_hello
        self.admin: Callable[[dict[str, Any]], dict[str, Any]] = lambda operation: {"ready": True}
        self.models: dict[str, int] = {MODEL: 0}  # name: Triton's max_batch_size
        self.refusal = ""  # if set, what every operation is refused with
        self.asked: list[Asked] = []
        self.operations: list[dict[str, Any]] = []
        self.live = threading.Event()
        self.live.set()
        self._server = grpc.server(ThreadPoolExecutor(32))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.target = f"127.0.0.1:{self.port}"
        self._server.start()

    def die(self) -> None:
        """Break off every connection, as kill -9 does."""
        self._server.stop(grace=None).wait(10)

    def ModelStreamInfer(self, requests: Iterator[pb.ModelInferRequest], context: Any) -> Iterator[Response]:
        for request in requests:
            asked = read_request(request)
            context.add_callback(asked.gone.set)
            self.asked.append(asked)
            yield from self.answer(asked)

    def ModelInfer(self, request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        if request.model_name != "limpet_admin":
            context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.model_name}' is not found")
        operation = json.loads(read_request(request).inputs["request"])
        if self.refusal:
            context.abort(grpc.StatusCode.INTERNAL, self.refusal)
        self.operations.append(operation)
        response = pb.ModelInferResponse()
        _add(response, "response", "BYTES", _string(json.dumps(self.admin(operation))))
        return response

    def ServerLive(self, request: pb.ServerLiveRequest, context: Any) -> pb.ServerLiveResponse:
        self.live.wait(30)
        return pb.ServerLiveResponse(live=True)

    def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Any) -> pb.RepositoryIndexResponse:
        index = pb.RepositoryIndexResponse()
        for name in (*self.models, "limpet_admin"):
            index.models.add(name=name, version="1", state="READY")
        index.models.add(name="broken", version="1", state="UNAVAILABLE")
        return index

    def ModelConfig(self, request: pb.ModelConfigRequest, context: Any) -> pb.ModelConfigResponse:
        names = ("text_input", "messages") if request.name in self.models else ("request",)
        config = config_pb.ModelConfig(name=request.name, max_batch_size=self.models.get(request.name, 0))
        config.model_transaction_policy.decoupled = request.name in self.models
        config.input.extend(config_pb.ModelInput(name=name) for name in names)
        return pb.ModelConfigResponse(config=config)


@contextmanager
def fake_server(port: int = 0) -> Iterator[FakeServer]:
    """A server that ends with the block."""
    server = FakeServer(port)
    try:
        yield server
    finally:
        server.die()
