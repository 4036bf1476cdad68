"""limpet-api in front of a real server: the command itself, OpenAI's client, and requests as others write them."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall, ChatCompletionToolParam
from prometheus_client.parser import text_string_to_metric_families

from limpet.client import Client
from tests.aids.chain import answer_ids, script
from tests.aids.chain_checkpoint import write_chain_huggingface
from tests.aids.live_server import LiveServer, free_ports, live_server
from tests.api.endpoint import endpoint
from tests.front_end.test_tools import HERMES

pytestmark = pytest.mark.server
LIMPET_API = Path(sys.executable).with_name("limpet-api")
DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
KEY = "secret"
PARAMETERS = {
    "type": "object",
    "properties": {"depth": {"enum": [7]}},
    "required": ["depth"],
    "additionalProperties": False,
}
TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": "look", "description": "Look down.", "parameters": PARAMETERS}}
]


@pytest.fixture(scope="module")
def url(chain: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The command's URL; Ctrl-C and SIGTERM alike end it with 0."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"other\n{KEY}\n")
    [port] = free_ports(1)
    command = [LIMPET_API, chain.target, f"--port={port}", f"--api-keys={keys}", "--log-level=warning"]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 60
    while not _is_healthy(url):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield url
    process.terminate()
    assert process.wait(30) == 0


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def ask(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def message(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_whole_and_streamed_chats_are_the_scripts(ask: openai.OpenAI) -> None:
    whole = ask.chat.completions.create(model="chain", messages=message("emoji"))
    assert whole.choices[0].message.content == script("emoji").text
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(answer_ids("emoji"))
    with ask.chat.completions.stream(model="chain", messages=message("chinese")) as stream:
        text = stream.get_final_completion().choices[0].message.content
    assert text == script("chinese").text


def test_stop_strings_and_limits_end_an_answer(ask: openai.OpenAI) -> None:
    stopped = ask.chat.completions.create(model="chain", messages=message("hello"), stop="model")
    assert stopped.choices[0].message.content == script("hello").text.split("model")[0]
    assert stopped.choices[0].finish_reason == "stop"
    cut = ask.completions.create(model="chain", prompt="loop", max_tokens=5, extra_body={"ignore_eos": True})
    assert (cut.choices[0].finish_reason, cut.usage and cut.usage.completion_tokens) == ("length", 5)


def test_echo_scores_the_prompt_as_the_client_library_does(chain: LiveServer, ask: openai.OpenAI) -> None:
    with Client(chain.target) as client:
        prompt = client.tokenize("Say hello")
        direct = client.generate(input_ids=prompt, max_tokens=1, prompt_logprobs=1)
    expected = [None if each is None else next(iter(each.values()))["logprob"] for each in direct.prompt_logprobs]
    for given in (prompt, "Say hello"):
        answer = ask.completions.create(model="chain", prompt=given, echo=True, max_tokens=1, logprobs=1)
        [choice] = answer.choices
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[:-1] == expected
        assert choice.text == "Say hello" + direct.text
        assert len(choice.logprobs.tokens or []) == len(prompt) + 1


def test_a_seed_repeats_an_answer(ask: openai.OpenAI) -> None:
    ask_hot = {"model": "chain", "prompt": "hello", "temperature": 100.0, "max_tokens": 12}
    texts = [ask.completions.create(**ask_hot, seed=seed).choices[0].text for seed in (1, 1, 2)]  # type: ignore[call-overload]
    assert texts[0] == texts[1] != texts[2]


def test_response_format_is_kept(ask: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "y", "schema": {"type": "integer"}}}
    answer = ask.chat.completions.create(model="chain", messages=message("hello"), response_format=form, max_tokens=4)  # type: ignore[call-overload]
    assert re.fullmatch(r"-?\d*", answer.choices[0].message.content or "")


def test_session_turns_pay_only_for_their_new_tokens(chain: LiveServer, ask: openai.OpenAI) -> None:
    session = {"session_id": "api-test"}
    first = ask.chat.completions.create(model="chain", messages=message("hello"), extra_body=session)
    assert first.usage is not None
    second = ask.chat.completions.create(
        model="chain", messages=message("spaces"), extra_body={**session, "session_end": True}
    )
    assert second.choices[0].message.content == script("spaces").text
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens - 1
    assert second.usage.prompt_tokens > first.usage.total_tokens
    with Client(chain.target) as client:
        assert "api-test" not in [each["session_id"] for each in client.sessions()]


def test_prompt_token_ids_are_what_was_computed(chain: LiveServer, ask: openai.OpenAI) -> None:
    wanted = {"return_token_ids": True}
    with Client(chain.target) as client:
        prompt = client.tokenize(messages=message("hello"))
        raw = client.tokenize("hello")
    chat = ask.chat.completions.create(model="chain", messages=message("hello"), extra_body=wanted)
    assert (chat.prompt_token_ids, chat.choices[0].token_ids) == (prompt, answer_ids("hello"))  # type: ignore[attr-defined]
    events = ask.chat.completions.create(model="chain", messages=message("hello"), stream=True, extra_body=wanted)
    assert next(iter(events)).prompt_token_ids == prompt  # type: ignore[attr-defined]
    answer = ask.completions.create(model="chain", prompt="hello", extra_body=wanted)
    assert answer.choices[0].prompt_token_ids == raw  # type: ignore[attr-defined]


def test_metrics_show_all_that_the_docs_list(url: str) -> None:
    families = {family.name for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text)}
    documented = re.findall(r"^\| `(limpet_\w+?)(?:_total)?` \|", DOCS.read_text("utf-8"), re.MULTILINE)
    assert len(documented) > 10
    assert set(documented) <= families


def test_a_client_that_goes_away_frees_its_slot(chain: LiveServer, ask: openai.OpenAI) -> None:
    with Client(chain.target) as client:
        stream = ask.completions.create(model="chain", prompt="loop", stream=True, max_tokens=100_000)
        next(iter(stream))
        assert _running(client) == 1
        stream.close()
        deadline = time.monotonic() + 10
        while _running(client):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def _running(client: Client) -> int:
    return int(client.status()["models"]["chain"]["running"])


def _events(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", f"{url}/v1/{path}", json=body, headers=headers) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_requests_of_vllm_bench_serve(url: str) -> None:
    """Its fields, and what it reads: a chunk with a choice for each token, the counts in the last."""
    common = {"model": "chain", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    raw = {**common, "prompt": "loop", "repetition_penalty": 1.0, "max_tokens": 7, "logprobs": None, "temperature": 0.0}
    *chunks, last = _events(url, "completions", raw)
    assert [chunk["choices"][0]["text"] for chunk in chunks]
    assert last["usage"]["completion_tokens"] == 7
    parts = [{"type": "text", "text": "loop"}]
    chat = {**common, "messages": [{"role": "user", "content": parts}], "max_completion_tokens": 7, "temperature": 0.0}
    *chunks, last = _events(url, "chat/completions", chat)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert last["usage"]["completion_tokens"] == 7


def test_the_calls_of_open_webui(url: str) -> None:
    """The list of models by Bearer key, then a streamed chat; errors are JSON with `error`."""
    assert httpx.get(f"{url}/v1/models").json()["error"]["message"]
    models = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {KEY}"}).json()["data"]
    assert [model["id"] for model in models] == ["chain"]
    body = {"model": "chain", "messages": message("hello"), "stream": True, "temperature": 0.8, "max_tokens": 64}
    texts = [event["choices"][0]["delta"].get("content", "") for event in _events(url, "chat/completions", body)]
    assert "".join(texts) == script("hello").text


def test_a_template_that_knows_no_tools_refuses_them(ask: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="knows no tools"):
        ask.chat.completions.create(model="chain", messages=message("hello"), tools=TOOLS)


@pytest.mark.long
def test_a_required_tool_is_called(tmp_path: Path) -> None:
    """The chain with a template that knows tools: its script counts for nothing, guided decoding for all."""
    source, template = tmp_path / "chain", tmp_path / "hermes.jinja"
    write_chain_huggingface(source)
    template.write_text(HERMES, "utf-8")
    limpet_convert = LIMPET_API.with_name("limpet-convert")
    options = [f"--dst={tmp_path / 'workspace'}", f"--chat-template={template}", "--cache-bytes=67108864"]
    subprocess.run([limpet_convert, source, *options], check=True, timeout=120)
    with live_server(tmp_path / "workspace" / "model_repository") as server:
        server.wait_ready()
        with endpoint(server.target) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            answer = client.chat.completions.create(
                model="chain",
                messages=message("hello"),
                tools=TOOLS,
                tool_choice="required",
                max_tokens=400,
                frequency_penalty=100,  # or white space between two words, which the form allows, might never end
            )
        assert server.stop() == 0
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"depth": 7})
