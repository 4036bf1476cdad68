"""Requests to a running server as a foreign client sends them: tritonclient alone, no code of Limpet."""

import http.client
import json
import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as triton

ANSWER_S = 60.0
_DTYPES: dict[str, tuple[str, Any]] = {
    "text_input": ("BYTES", np.object_),
    "messages": ("BYTES", np.object_),
    "input_ids": ("INT32", np.int32),
    "sampling_parameters": ("BYTES", np.object_),
    "max_tokens": ("INT32", np.int32),
    "min_tokens": ("INT32", np.int32),
    "top_k": ("INT32", np.int32),
    "end_id": ("INT32", np.int32),
    "temperature": ("FP32", np.float32),
    "top_p": ("FP32", np.float32),
    "min_p": ("FP32", np.float32),
    "repetition_penalty": ("FP32", np.float32),
    "presence_penalty": ("FP32", np.float32),
    "frequency_penalty": ("FP32", np.float32),
    "bad_words": ("BYTES", np.object_),
    "seed": ("UINT64", np.uint64),
    "random_seed": ("UINT64", np.uint64),
    "beam_width": ("INT32", np.int32),
    "stop_words": ("BYTES", np.object_),
}  # everything else is BOOL


@dataclass(frozen=True)
class Response:
    """One response as it came: the outputs' values, or the error."""

    request_id: str = ""
    outputs: dict[str, list[Any]] = field(default_factory=dict)
    error: str | None = None
    final: bool = False

    @property
    def text(self) -> str:
        return "".join(part.decode("utf-8") for part in self.outputs["text_output"])


class Wire:
    """One model of a server, one connection and one stream; `batched`: every tensor has a dimension of 1 in front."""

    def __init__(self, target: str, model: str, *, batched: bool = False, unsigned: bool = False) -> None:
        self._model = model
        self._batched = batched
        self._unsigned = unsigned
        self._client = triton.InferenceServerClient(target)
        self._arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._arrived.put((result, error)))

    def send(self, parameters: dict[str, Any] | None = None, *, request_id: str = "", **values: Any) -> None:
        """Start a request. `values` are tensors by name, and sequence_id, sequence_start, sequence_end."""
        sequence = {name: values.pop(name) for name in list(values) if name.startswith("sequence_")}
        inputs = [self._tensor(name, value) for name, value in values.items()]
        self._client.async_stream_infer(self._model, inputs, request_id=request_id, parameters=parameters, **sequence)

    def _tensor(self, name: str, value: Any) -> Any:
        datatype, dtype = _DTYPES.get(name, ("BOOL", np.bool_))
        if self._unsigned and datatype == "INT32":
            datatype, dtype = "UINT32", np.uint32
        array = np.atleast_1d(np.array(value, dtype=dtype))
        array = array[np.newaxis] if self._batched else array
        tensor = triton.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        return tensor

    def next(self, timeout_s: float = ANSWER_S) -> Response:
        """The next response; raises queue.Empty if none comes in time."""
        result, error = self._arrived.get(timeout=timeout_s)
        if error is not None:
            return Response(error=error.message(), final=True)
        reply = result.get_response()
        outputs = {output.name: result.as_numpy(output.name).reshape(-1).tolist() for output in reply.outputs}
        return Response(reply.id, outputs, final=reply.parameters["triton_final_response"].bool_param)

    def rest(self, timeout_s: float = ANSWER_S) -> Iterator[Response]:
        """Responses up to the one that says it is the last, or an error; each within the time."""
        while True:
            response = self.next(timeout_s)
            yield response
            if response.final:
                return

    def ask(self, parameters: dict[str, Any] | None = None, **values: Any) -> list[Response]:
        """All responses of one request."""
        self.send(parameters, **values)
        return list(self.rest())

    def pending(self) -> int:
        """Responses that arrived and were not looked at."""
        return self._arrived.qsize()

    def close(self) -> None:
        """Cancel what runs and close the connection."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


@contextmanager
def wire(target: str, model: str, *, batched: bool = False, unsigned: bool = False) -> Iterator[Wire]:
    """A connection that is closed in the end."""
    connection = Wire(target, model, batched=batched, unsigned=unsigned)
    try:
        yield connection
    finally:
        connection.close()


def text_of(responses: list[Response]) -> str:
    """The whole text of an answer; fails on an error."""
    assert not [response.error for response in responses if response.error]
    return "".join(response.text for response in responses)


def ids_of(responses: list[Response]) -> list[int]:
    """The ids of an answer; fails on an error."""
    assert not [response.error for response in responses if response.error]
    return [token for response in responses for token in response.outputs["output_ids"]]


def post(url: str, path: str, body: Any) -> tuple[int, str]:
    """Status and text of what `curl -d BODY URL/PATH` gets."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=ANSWER_S)
    try:
        connection.request("POST", path, json.dumps(body))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def engine_status(url: str, model: str) -> dict[str, Any]:
    """What limpet_admin says of a model's engine."""
    code, text = post(url, "/v2/models/limpet_admin/generate", {"request": json.dumps({"op": "status"})})
    assert code == 200, text
    status: dict[str, Any] = json.loads(json.loads(text)["response"])["models"][model]
    return status


def await_engine(url: str, model: str, timeout_s: float = ANSWER_S, **counts: int) -> dict[str, Any]:
    """The engine's status once these counts are reached, such as requests=0."""
    deadline = time.monotonic() + timeout_s
    while any((status := engine_status(url, model))[name] != count for name, count in counts.items()):
        assert time.monotonic() < deadline, f"{counts} is not reached: {status}"
        time.sleep(0.05)
    return status
