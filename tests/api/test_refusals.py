"""What goes wrong has OpenAI's form: a status, an error object, Retry-After where it is worth trying again."""

import json
import socket
import subprocess
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.api.endpoint import endpoint
from tests.client.chat_process import command
from tests.client.fake_server import Asked, FakeServer, Response, data, error, fake_server

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("wire", "status", "code", "retry"),
    [
        ("[INVALID_ARG] No.", 400, None, False),
        ("[NOT_FOUND] No adapter.", 404, "model_not_found", False),
        ("[UNAVAILABLE] The queue is full (9 requests wait): try again.", 429, "queue_full", True),
        ("[UNAVAILABLE] The server is stopping.", 503, "unavailable", True),
        ("[CANCELLED] The request's timeout_ms passed.", 408, "cancelled", False),
        ("[INTERNAL] Broken.", 500, "internal", False),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_server(
    server: FakeServer, url: str, wire: str, status: int, code: str | None, retry: bool, stream: bool
) -> None:
    server.answer = lambda asked: iter([error(wire)])
    response = httpx.post(f"{url}/v1/chat/completions", json={**CHAT, "stream": stream})
    assert response.status_code == status
    body = response.json()["error"]
    assert (body["message"], body["code"]) == (wire.split("] ")[1], code)
    assert ("retry-after" in response.headers) == retry


def test_a_failure_in_mid_stream_is_an_event(server: FakeServer, ask: openai.OpenAI) -> None:
    server.answer = lambda asked: iter([data("a"), error("[INTERNAL] Broken.")])
    stream = ask.completions.create(model="tiny", prompt="x", stream=True)
    assert next(stream).choices[0].text == "a"
    with pytest.raises(openai.APIError, match=r"Broken\."):
        next(stream)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({**CHAT, "temprature": 1}, "temprature", "Unknown parameter 'temprature'."),
        ({}, "messages", "Field required"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages", "text"),
        ({**CHAT, "n": 2}, "n", "1"),
        ({**CHAT, "max_tokens": "many"}, "max_tokens", "integer"),
        ({**CHAT, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "none of the tools"),
        ({**CHAT, "tool_choice": "required"}, "tool_choice", "no tools"),
        ({**CHAT, "top_logprobs": 2}, "top_logprobs", "logprobs to be true"),
        ({**CHAT, "session_end": True}, "session_end", "session_id"),
        ({**CHAT, "session_rewind": 1}, "session_rewind", "session_id"),
        ({**CHAT, "session_id": "x", "session_rewind": 10**30}, None, "session_rewind"),
        ({**CHAT, "session_id": "0"}, None, "not 0"),
    ],
)
def test_bodies_that_can_never_work(url: str, body: dict[str, object], param: str | None, message: str) -> None:
    response = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert response.status_code == 400
    refused = response.json()["error"]
    assert refused["param"] == param
    assert message in refused["message"]


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b'"x"', b"[" * 100_000, b'{"messages": NaN}'])
def test_bodies_that_are_no_json_object(url: str, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{url}/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "content",
    [
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"\\ud800": 1, "messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}',
        b'{"temperature": Infinity, "messages": [{"role": "user", "content": "x"}]}',
    ],
)
def test_values_that_cannot_be_written_are_refused(url: str, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{url}/v1/chat/completions", content=content, headers=headers)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["message"]


def test_unknown_model_and_unknown_path(url: str, ask: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="known are tiny") as refused:
        ask.completions.create(model="nix", prompt="x")
    assert refused.value.code == "model_not_found"
    assert httpx.get(f"{url}/v1/nothing").json()["error"]["message"] == "Not Found"


def test_only_requests_with_a_key_are_answered() -> None:
    with fake_server() as server, endpoint(server.target, ["first", "second", "schlüssel"]) as url:
        models = f"{url}/v1/models"
        for headers in ({}, {"Authorization": "Bearer third"}, {"Authorization": "Basic first"}):
            response = httpx.get(models, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        for right in ("second", "schlüssel"):
            assert httpx.get(models, headers={"Authorization": f"Bearer {right}".encode()}).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_port_that_is_taken_is_exit_code_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = ["127.0.0.1:1", f"--port={taken.getsockname()[1]}"]
        done = subprocess.run([command("limpet-api"), *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "address already in use" in done.stderr) == (1, True)


def test_a_server_that_is_away_is_503() -> None:
    with endpoint("127.0.0.1:1") as url:
        for path in ("/health", "/v1/models"):
            response = httpx.get(url + path, timeout=30)
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
        assert 'limpet_api_requests_total{path="/health",status="503"} 1.0' in httpx.get(f"{url}/metrics").text


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(("stream", "has_begun"), [(False, False), (True, False), (True, True)])
def test_a_client_that_goes_away_cancels_its_request(
    server: FakeServer, url: str, path: str, stream: bool, has_begun: bool
) -> None:
    asked_now = threading.Event()

    def answer(asked: Asked) -> Iterator[Response]:
        if has_begun:
            yield data("x")
        asked_now.set()
        asked.gone.wait(60)

    server.answer = answer
    body = json.dumps({"stream": stream, **CHAT} if path == "chat/completions" else {"stream": stream, "prompt": "x"})
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        if has_begun:
            assert connection.recv(1)
        assert asked_now.wait(30)
    assert server.asked[0].gone.wait(30)
