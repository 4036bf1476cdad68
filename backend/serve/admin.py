"""limpet-serve's questions to the running server: is it ready, which models, drain. Over gRPC, through limpet_admin."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import tritonclient.grpc as triton

from limpet.backend.serve.errors import ServeError

ADMIN_MODEL = "limpet_admin"
_READY_S = 1.0  # ready means: answered within a second
_TIMEOUT_S = 10.0
# A channel that found no server yet would wait longer and longer before it tries again, and share that with the next.
_CHANNEL = [("grpc.use_local_subchannel_pool", 1)]


class AdminError(ServeError):
    """The server did not answer, or refused; the message is its reason."""


class Admin:
    """One server, by its gRPC address; each call has a connection of its own. `keys` are the models' admin keys."""

    def __init__(self, target: str, keys: Mapping[str, str]) -> None:
        self._target = target
        self._keys = keys

    def why_not_ready(self) -> str | None:
        """None if ready, else the reason."""
        try:
            status = self._ask({"op": "status"}, _READY_S)
        except AdminError as error:
            return str(error)
        return None if status.get("ready") else str(status.get("reason") or "the engine is not ready.")

    def drain(self) -> int:
        """Refuse new requests from now on; returns how many are still running."""
        drains = [{"op": "drain", "model": model, "admin_key": key} for model, key in self._keys.items()]
        return sum(int(self._ask(drain, _TIMEOUT_S)["requests"]) for drain in drains)

    def models(self) -> list[str]:
        """Names of the models that are loaded, limpet_admin left out."""
        with self._client() as client:
            index = client.get_model_repository_index(as_json=True, client_timeout=_TIMEOUT_S).get("models", [])
        return [model["name"] for model in index if model.get("state") == "READY" and model["name"] != ADMIN_MODEL]

    def _ask(self, operation: dict[str, str], timeout_s: float) -> dict[str, Any]:
        request = triton.InferInput("request", [1], "BYTES")
        request.set_data_from_numpy(np.array([json.dumps(operation)], dtype=np.object_))
        with self._client() as client:
            answer = client.infer(ADMIN_MODEL, [request], client_timeout=timeout_s).as_numpy("response")
        reply: dict[str, Any] = json.loads(answer[0])
        return reply

    @contextmanager
    def _client(self) -> Iterator[Any]:
        client = triton.InferenceServerClient(self._target, channel_args=_CHANNEL)
        try:
            yield client
        except triton.InferenceServerException as error:
            raise AdminError(error.message()) from None
        finally:
            client.close()
