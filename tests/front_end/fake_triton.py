"""What the Python backend's stub gives a model, as plain objects that check how they are used."""

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

FINAL_FLAG = 1
WAIT_S = 20.0


class Tensor:
    def __init__(self, name: str, array: "np.ndarray[Any, Any]") -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> "np.ndarray[Any, Any]":
        return self._array


class TritonError:
    INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, CANCELLED = (
        "INTERNAL",
        "NOT_FOUND",
        "INVALID_ARG",
        "UNAVAILABLE",
        "CANCELLED",
    )

    def __init__(self, message: str, code: str = "INTERNAL") -> None:
        self.text, self.code = message, code

    @property
    def message(self) -> str:
        """The sentence, behind the code that every text begins with: a stream's client sees nothing else of it."""
        prefix = f"[{self.code}] "
        assert self.text.startswith(prefix), self.text
        return self.text.removeprefix(prefix)


class TritonModelException(Exception):
    pass


class InferenceResponse:
    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        self.outputs = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error

    @property
    def text(self) -> str:
        text: bytes = self.outputs["text_output"][0]
        return text.decode()

    def value(self, name: str) -> Any:
        """The output's list, or its only element."""
        listed = self.outputs[name].tolist()
        return listed[0] if len(listed) == 1 and name != "output_ids" else listed


class FakeSender:
    """A response sender that notes every breach of its rules, and can hold a send up."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.breaches: list[str] = []
        self.client_gone = False
        self.num_polls = 0
        self.gate = threading.Event()
        self.gate.set()
        self._changed = threading.Condition()
        self._is_final = False
        self._thread: int | None = None

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        self._check_thread()
        self._notice(self._is_final, "a response after FINAL")
        self._notice(response is None, "a response without tensors")
        self.gate.wait(WAIT_S)
        with self._changed:
            if response is not None:
                self.responses.append(response)
            self._is_final = self._is_final or flags == FINAL_FLAG
            self._changed.notify_all()

    def is_cancelled(self) -> bool:
        self._check_thread()
        self.num_polls += 1
        return self.client_gone

    def wait_for(self, num_responses: int) -> list[InferenceResponse]:
        """Until so many responses have come."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.responses) >= num_responses, WAIT_S), self.responses
        return self.responses

    def all(self) -> list[InferenceResponse]:
        """Until FINAL; every response, the rules checked."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_final, WAIT_S), "no FINAL"
        assert not self.breaches
        assert all(response.error is None for response in self.responses[:-1])
        return self.responses

    @property
    def is_final(self) -> bool:
        return self._is_final

    def _check_thread(self) -> None:
        self._thread = self._thread or threading.get_ident()
        self._notice(self._thread != threading.get_ident(), "two threads on one sender")

    def _notice(self, is_breach: bool, breach: str) -> None:
        if is_breach:
            self.breaches.append(breach)


@dataclass
class FakeRequest:
    """A request as the stub delivers it; `values` are tensors."""

    values: Mapping[str, Any] = field(default_factory=dict)
    own_parameters: Any = field(default_factory=dict)
    session: int | str = 0
    own_flags: int = 0
    sender: FakeSender = field(default_factory=FakeSender)

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, _array(value)) for name, value in self.values.items()]

    def parameters(self) -> str:
        return self.own_parameters if isinstance(self.own_parameters, str) else json.dumps(self.own_parameters)

    def correlation_id(self) -> int | str:
        return self.session

    def flags(self) -> int:
        return self.own_flags

    def request_id(self) -> str:
        return "request"

    def get_response_sender(self) -> FakeSender:
        return self.sender


class Metric:
    """One series; a counter refuses to go down, as Triton's does."""

    def __init__(self, labels: dict[str, str], *, counts_up: bool) -> None:
        self.labels = labels
        self.value = 0.0
        self._counts_up = counts_up

    def increment(self, by: float) -> None:
        assert by >= 0, "a counter cannot go down"
        self.value += by

    def set(self, value: float) -> None:
        assert not self._counts_up, "a counter cannot be set"
        self.value = value


class MetricFamily:
    """Remembers every family, so that a test can read what was published."""

    COUNTER, GAUGE = 0, 1
    all: ClassVar[dict[str, "MetricFamily"]] = {}

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.kind = kind
        self.metrics: list[Metric] = []
        self.all[name] = self

    def Metric(self, labels: dict[str, str]) -> Metric:
        self.metrics.append(Metric(labels, counts_up=self.kind == self.COUNTER))
        return self.metrics[-1]


def _array(value: Any) -> "np.ndarray[Any, Any]":
    listed = value if isinstance(value, list) else [value]
    encoded = [each.encode() if isinstance(each, str) else each for each in listed]
    return np.array(encoded, dtype=np.object_ if any(isinstance(each, bytes) for each in encoded) else None)


def _input_tensor(request: FakeRequest, name: str) -> Tensor:
    return next(tensor for tensor in request.inputs() if tensor.name() == name)


def install() -> None:
    """Make `import triton_python_backend_utils` find these."""
    module: Any = ModuleType("triton_python_backend_utils")
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL_FLAG
    module.Tensor, module.InferenceResponse, module.TritonError = Tensor, InferenceResponse, TritonError
    module.MetricFamily = MetricFamily
    module.TritonModelException, module.get_input_tensor_by_name = TritonModelException, _input_tensor
    sys.modules.setdefault("triton_python_backend_utils", module)
