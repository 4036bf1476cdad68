"""Guided decoding through tritonserver: every answer has its form, whoever runs beside it."""

import json
import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from limpet.client import Client, InvalidRequest
from tests.aids.live_server import LiveServer
from tests.aids.wire import post, text_of, wire

pytestmark = pytest.mark.server
MESSAGES = [{"role": "user", "content": "Tell me about Paris."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "river": {"enum": ["Seine", "Thames"]},
    },
    "required": ["city", "population", "river"],
}
JSON = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
# Eight requests, and what their answers match.
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": JSON}, "json"),
    ({"response_format": JSON, "temperature": 1.5, "seed": 5}, "json"),
    ({"structured_outputs": {"json": SCHEMA}, "repetition_penalty": 1.2}, "json"),
    ({"response_format": {"type": "regex", "regex": r"[A-Z][a-z]+ \([0-9]{4}\)"}}, r"[A-Z][a-z]+ \([0-9]{4}\)"),
    ({"response_format": {"type": "choice", "choice": ["Löwe 🦁", "Muschel"]}}, "Löwe 🦁|Muschel"),
    ({"response_format": {"type": "grammar", "grammar": 'root ::= "(" root ")" | [0-9]'}}, r"\(*[0-9]\)*"),
    ({"presence_penalty": 1.0, "max_tokens": 12}, r"(?s).*"),
    ({"response_format": {"type": "regex", "regex": "[ab]{12}"}, "logprobs": 1, "ignore_eos": True}, "[ab]{12}"),
]


def ask(server: LiveServer, options: dict[str, Any], *, stream: bool) -> str:
    sampling = {"max_tokens": 60, "temperature": 0, **options}
    with wire(server.target, "smollm2") as client:
        asked = {"messages": json.dumps(MESSAGES), "sampling_parameters": json.dumps(sampling), "stream": stream}
        return text_of(client.ask(**asked))


def check(text: str, form: str) -> None:
    if form == "json":
        value = json.loads(text)
        assert list(value) == ["city", "population", "river"]
        assert value["river"] in ("Seine", "Thames")
        assert isinstance(value["population"], int)
    else:
        assert re.fullmatch(form, text), text


def test_eight_forms_at_once_streamed_and_not_as_alone(smollm2: LiveServer) -> None:
    alone = [ask(smollm2, options, stream=False) for options, _ in FORMS]
    for (_, form), text in zip(FORMS, alone, strict=True):
        check(text, form)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda case: ask(smollm2, case[0], stream=True), FORMS)) == alone


def test_a_form_counts_for_one_turn_of_a_session(smollm2: LiveServer) -> None:
    with Client(smollm2.target) as client, client.session() as session:
        first = session.ask("Give me a digit.", response_format={"type": "regex", "regex": "[0-9]"}, temperature=0)
        second = session.ask("And now a word.", max_tokens=5, temperature=0)
        third = session.ask("Yes or no?", response_format={"type": "choice", "choice": ["Yes", "No"]}, temperature=0)
    assert re.fullmatch("[0-9]", first.text)
    assert not re.fullmatch("[0-9]", second.text)
    assert third.text in ("Yes", "No")
    assert third.num_cached_tokens > 0


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"type": "regex", "regex": "(a"}, "regex cannot be followed"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "minimum": 3, "maximum": 2}}},
            "minimum",
        ),
        ({"type": "json_schema", "json_schema": {"schema": {"not": {}}}}, "not of the JSON schema at #"),
    ],
)
def test_an_impossible_form_is_one_error_and_the_session_goes_on(
    smollm2: LiveServer, form: dict[str, Any], reason: str
) -> None:
    with Client(smollm2.target) as client, client.session() as session:
        with pytest.raises(InvalidRequest, match=reason):
            session.ask("Hello", response_format=form)
        assert session.ask("Hello", max_tokens=2).num_output_tokens == 2


def test_tensorrt_llms_tensors_over_http(smollm2: LiveServer) -> None:
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(north|south)(east|west)"}
    body = {"text_input": f"Paris lies in the {uuid.uuid4()}", "temperature": 0, **guide}
    status, text = post(smollm2.http, "/v2/models/smollm2/generate", body)
    assert status == 200, text
    assert re.fullmatch("(north|south)(east|west)", json.loads(text)["text_output"])
