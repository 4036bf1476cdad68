"""Interactive sessions through tritonserver: turns append, cost only their new tokens, and never mix."""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.aids.chain import script
from tests.aids.live_server import LiveServer
from tests.aids.wire import Response, Wire, text_of, wire

pytestmark = pytest.mark.server


@pytest.fixture
def client(smollm2: LiveServer) -> Iterator[Wire]:
    with wire(smollm2.target, "smollm2") as connection:
        yield connection


@pytest.fixture
def scripted(chain: LiveServer) -> Iterator[Wire]:
    with wire(chain.target, "chain") as connection:
        yield connection


def _new_id() -> str:
    return uuid.uuid4().hex


def _turn(client: Wire, session: Any, text: str, max_tokens: int = 12, **options: Any) -> list[Response]:
    return client.ask(
        text_input=text,
        max_tokens=max_tokens,
        temperature=0.0,
        stream=True,
        return_num_cached_tokens=True,
        return_session_tokens=True,
        return_finish_reason=True,
        sequence_id=session,
        **options,
    )


def _count(responses: list[Response], name: str) -> int:
    assert not [response.error for response in responses if response.error]
    value: int = responses[-1].outputs[name][0]
    return value


@pytest.mark.parametrize("max_tokens", [12, 200], ids=["cut by max_tokens", "ended by the model"])
def test_three_turns_report_the_whole_history_but_one_token_as_cached(client: Wire, max_tokens: int) -> None:
    session = _new_id()
    history = 0
    for number, text in enumerate(["Hi! I am Ada.", "Say one word.", "And another one."]):
        responses = _turn(client, session, text, max_tokens, sequence_start=number == 0)
        assert _count(responses, "num_cached_tokens") == max(history - 1, 0)
        history = _count(responses, "session_tokens")
    client.ask(text_input="", sequence_id=session, sequence_end=True)


def test_second_turn_remembers_the_first(client: Wire) -> None:
    session = _new_id()
    _turn(client, session, "My name is Bartholomew. Please remember it.", 40, sequence_start=True)
    answer = text_of(_turn(client, session, "What is my name?", 40, sequence_end=True))
    assert "Bartholomew" in answer


@pytest.mark.parametrize("session", [4711, "4711"], ids=["integer", "string"])
def test_session_ids_of_both_kinds_work(scripted: Wire, session: int | str) -> None:
    assert text_of(_turn(scripted, session, "hello", 100, sequence_start=True)) == script("hello").text
    assert text_of(_turn(scripted, session, "emoji", 100, sequence_end=True)) == script("emoji").text


def test_turn_of_an_unknown_session_is_an_error(scripted: Wire) -> None:
    responses = _turn(scripted, _new_id(), "hello")
    assert responses[-1].error is not None
    assert "session not found" in responses[-1].error.lower()


def test_ended_session_is_not_found(scripted: Wire) -> None:
    session = _new_id()
    _turn(scripted, session, "hello", 100, sequence_start=True)
    ended = scripted.ask(text_input="", sequence_id=session, sequence_end=True, stream=True)
    assert ended[-1].error is None
    assert "session not found" in (_turn(scripted, session, "hello")[-1].error or "").lower()


def test_second_turn_while_one_runs_is_busy_and_does_not_disturb_it(scripted: Wire, chain: LiveServer) -> None:
    session = _new_id()
    scripted.send(text_input="loop", max_tokens=3000, stream=True, sequence_id=session, sequence_start=True)
    first = scripted.next()
    with wire(chain.target, "chain") as other:
        busy = _turn(other, session, "hello")
    assert "session busy" in (busy[-1].error or "").lower()
    assert text_of([first, *scripted.rest()]).count("tick0 ") == 30


def test_dropped_stream_frees_its_session_for_the_next_turn(chain: LiveServer) -> None:
    session = _new_id()
    with wire(chain.target, "chain") as dropped:
        dropped.send(text_input="loop", max_tokens=50_000, stream=True, sequence_id=session, sequence_start=True)
        dropped.next()
    with wire(chain.target, "chain") as client:
        assert text_of(_turn(client, session, "hello", 100)) == script("hello").text


def test_sixteen_sessions_at_once_keep_apart(chain: LiveServer) -> None:
    keys = [("hello", "emoji"), ("chinese", "spaces"), ("code", "hello"), ("stop", "lines")] * 4

    def converse(pair: tuple[str, str]) -> tuple[str, ...]:
        session = _new_id()
        with wire(chain.target, "chain") as client:
            first = text_of(_turn(client, session, pair[0], 200, sequence_start=True))
            return first, text_of(_turn(client, session, pair[1], 200, sequence_end=True))

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(converse, keys)) == [(script(one).text, script(other).text) for one, other in keys]
