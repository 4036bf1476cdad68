"""Servers that are measured: over gRPC, or over HTTP with OpenAI's API. Both answer token ids with token ids."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from limpet.benchmarks.timing import Answer
from limpet.benchmarks.workload import Request
from limpet.client import Client, LimpetError

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ServedModel:
    """What a server says of the model that is measured; 0 and "" where it says nothing."""

    name: str
    vocab_size: int = 0
    dtype: str = ""
    block_size: int = 0


class Connection(Protocol):
    """Used by many threads at once."""

    def answer(self, request: Request) -> Answer:
        """Send the request and read its answer to the end; raises TargetError."""
        ...

    def tokenize(self, text: str) -> list[int]: ...

    def model(self) -> ServedModel: ...

    def close(self) -> None: ...


class TargetError(Exception):
    """A request failed; the text says why."""


@dataclass(frozen=True)
class Target:
    """A server by its address: HOST:PORT is gRPC, http://HOST:PORT OpenAI's API."""

    address: str
    model: str | None = None
    key: str = ""

    @property
    def is_http(self) -> bool:
        return self.address.startswith("http://")

    def connect(self) -> Connection:
        return HttpConnection(self) if self.is_http else GrpcConnection(self)


class GrpcConnection:
    """Streams of limpet.client."""

    def __init__(self, target: Target) -> None:
        self._client = Client(target.address, model=target.model)

    def answer(self, request: Request) -> Answer:
        answer = Answer(time.monotonic())
        try:
            with self._client.generate(
                input_ids=request.prompt,
                stream=True,
                max_tokens=request.num_output_tokens,
                temperature=0.0,
                ignore_eos=True,
                cache_salt=request.cache_salt,
            ) as stream:
                for chunk in stream:
                    if chunk.num_output_tokens:
                        answer.arrivals.append((time.monotonic(), chunk.num_output_tokens))
                        answer.last_id = chunk.output_ids[-1]
                    answer.num_input_tokens = chunk.num_input_tokens
                    answer.num_cached_tokens = chunk.num_cached_tokens
        except LimpetError as error:
            raise TargetError(str(error)) from None
        return answer

    def tokenize(self, text: str) -> list[int]:
        return self._client.tokenize(text)

    def model(self) -> ServedModel:
        name = self._client.model
        summary = self._client.status()["models"].get(name, {}).get("engine", {})
        return ServedModel(name, summary.get("vocab_size", 0), summary.get("dtype", ""), summary.get("block_size", 0))

    def close(self) -> None:
        self._client.close()


class HttpConnection:
    """OpenAI's API; each thread keeps a connection of its own."""

    def __init__(self, target: Target) -> None:
        url = urlsplit(target.address)
        self._host, self._port = url.hostname or "", url.port or 80
        self._headers = {"Content-Type": "application/json"}
        if target.key:
            self._headers["Authorization"] = f"Bearer {target.key}"
        self._model = target.model
        self._of_thread = threading.local()

    def answer(self, request: Request) -> Answer:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.num_output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
        }
        if request.cache_salt:  # vLLM's name too
            body["cache_salt"] = request.cache_salt
        answer = Answer(time.monotonic())
        num_tokens = 0
        for event in self._events("/v1/completions", body):
            if "error" in event:
                raise TargetError(str(event["error"].get("message", event["error"])))
            usage = event.get("usage") or {}
            if (so_far := usage.get("completion_tokens", 0)) > num_tokens:
                answer.arrivals.append((time.monotonic(), so_far - num_tokens))
                num_tokens = so_far
            for choice in event["choices"]:
                answer.last_id = next(reversed(choice.get("token_ids") or ()), answer.last_id)
            answer.num_input_tokens = usage.get("prompt_tokens", answer.num_input_tokens)
            details = usage.get("prompt_tokens_details") or {}
            answer.num_cached_tokens = details.get("cached_tokens") or answer.num_cached_tokens
        return answer

    def tokenize(self, text: str) -> list[int]:
        answer = self._ask("POST", "/tokenize", {"model": self._model, "prompt": text})
        return list(answer["tokens"])

    def model(self) -> ServedModel:
        models = self._ask("GET", "/v1/models", None)["data"]
        chosen = next((each for each in models if self._model in (None, each["id"])), None)
        if chosen is None:
            raise TargetError(f"The server has no model {self._model!r}.")
        return ServedModel(chosen["id"], chosen.get("vocab_size") or 0)

    def close(self) -> None:
        """The threads' connections end with their threads."""

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._send("POST", path, body) as response:
            try:
                for line in response:
                    data = line.strip().removeprefix(b"data: ")
                    if data.startswith(b"{"):
                        yield json.loads(data)
            except (OSError, http.client.HTTPException) as error:
                raise TargetError(f"{path}: {error}") from None

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        with self._send(method, path, body) as response:
            answer: dict[str, Any] = json.loads(response.read())
            return answer

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        try:
            connection = self._connection()
            connection.request(method, path, None if body is None else json.dumps(body), self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self._of_thread.__dict__.clear()
            raise TargetError(f"{path}: {error}") from None
        if response.status != 200:
            raise TargetError(f"{path}: status {response.status}: {response.read().decode('utf-8', 'replace')}")
        return response

    def _connection(self) -> http.client.HTTPConnection:
        if not hasattr(self._of_thread, "connection"):
            self._of_thread.connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        connection: http.client.HTTPConnection = self._of_thread.connection
        return connection
