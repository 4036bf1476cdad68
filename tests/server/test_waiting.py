"""Requests with a time limit, running and waiting, through tritonserver."""

import json
import uuid
from collections.abc import Iterator

import pytest

from tests.aids.live_server import LiveServer
from tests.aids.repositories import CHAIN_ENGINE
from tests.aids.wire import Response, Wire, text_of, wire

pytestmark = pytest.mark.server
LIMITED = json.dumps({"timeout_ms": 300})


@pytest.fixture
def client(chain: LiveServer) -> Iterator[Wire]:
    with wire(chain.target, "chain") as connection:
        yield connection


def _loop(client: Wire, **options: object) -> None:
    client.send(text_input="loop", ignore_eos=True, max_tokens=50_000, stream=True, **options)


def _assert_expired(last: Response) -> None:
    assert last.error is not None
    assert "[CANCELLED]" in last.error
    assert "timeout_ms" in last.error


def test_time_limit_ends_a_running_answer_and_its_session_goes_on(client: Wire) -> None:
    session = uuid.uuid4().hex
    _loop(client, sampling_parameters=LIMITED, sequence_id=session, sequence_start=True)
    *answered, last = client.rest()
    _assert_expired(last)
    assert text_of(answered).startswith("tick0 tick1 "), "what came before the limit was delivered"
    again = client.ask(
        text_input="hello", max_tokens=3, stream=True, return_num_cached_tokens=True, sequence_id=session
    )
    assert text_of(again).startswith("Hello")
    assert again[-1].outputs["num_cached_tokens"][0] >= len(answered)


def test_time_limit_ends_a_request_that_waits_for_a_slot(client: Wire, chain: LiveServer) -> None:
    with wire(chain.target, "chain") as others:
        for index in range(CHAIN_ENGINE.max_batch_size):
            _loop(others, request_id=str(index))
        begun: set[str] = set()
        while len(begun) < CHAIN_ENGINE.max_batch_size:
            response = others.next()
            assert response.error is None
            begun.add(response.request_id)
        [last] = client.ask(text_input="hello", sampling_parameters=LIMITED)
        _assert_expired(last)
    assert text_of(client.ask(text_input="hello", max_tokens=100)).startswith("Hello")
