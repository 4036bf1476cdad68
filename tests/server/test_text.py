"""Scripted text through the chain checkpoint: what the model said arrives exactly, streamed or not, in any crowd."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.aids.chain import answer_ids, script
from tests.aids.chain_scripts import SCRIPTS
from tests.aids.live_server import LiveServer
from tests.aids.wire import Response, text_of, wire

pytestmark = pytest.mark.server
ENDING = [each.key for each in SCRIPTS if not each.loops and each.key != "long"]
BROKEN = "broken"  # its bytes are no UTF-8: U+FFFD is what it says


def _ask(server: LiveServer, key: str, stream: bool = True) -> list[Response]:
    with wire(server.target, "chain") as client:
        return client.ask(text_input=key, max_tokens=4000, stream=stream, return_output_ids=True)


@pytest.mark.parametrize("key", [*ENDING, "long"])
def test_streamed_text_is_exact(chain: LiveServer, key: str) -> None:
    assert text_of(_ask(chain, key)) == script(key).text


@pytest.mark.parametrize("key", [key for key in ENDING if key != BROKEN])
def test_no_delta_shows_half_a_character(chain: LiveServer, key: str) -> None:
    assert not [response.text for response in _ask(chain, key) if "\ufffd" in response.text]


@pytest.mark.parametrize("key", ENDING)
def test_answer_without_streaming_is_one_response_with_the_same_text(chain: LiveServer, key: str) -> None:
    responses = _ask(chain, key, stream=False)
    assert len(responses) == 1
    assert responses[0].final
    assert text_of(responses) == script(key).text


@pytest.mark.parametrize("stream", [True, False])
def test_output_ids_are_the_scripts(chain: LiveServer, stream: bool) -> None:
    ids = [token for response in _ask(chain, "emoji", stream) for token in response.outputs["output_ids"]]
    assert ids == answer_ids("emoji")


def test_last_data_response_is_the_final_one_and_nothing_follows(chain: LiveServer) -> None:
    with wire(chain.target, "chain") as client:
        client.send(text_input="long", max_tokens=300, stream=True)
        responses = list(client.rest())
        # The next request's responses come after whatever the first one may still have had to say.
        follow_up = client.ask(text_input="hello", max_tokens=50, stream=True)
        assert client.pending() == 0
    assert [response.final for response in responses[:-1]] == [False] * (len(responses) - 1)
    assert all("text_output" in response.outputs for response in responses)
    assert text_of(follow_up) == script("hello").text


def test_sixteen_clients_at_once_get_their_own_text(chain: LiveServer) -> None:
    keys = [ENDING[number % len(ENDING)] for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda key: text_of(_ask(chain, key)), keys))
    assert texts == [script(key).text for key in keys]


def test_requests_on_one_stream_keep_apart(chain: LiveServer) -> None:
    """Triton interleaves the responses of one stream's requests; each says which request it belongs to."""
    with wire(chain.target, "chain") as client:
        for key in ("long", "emoji", "hello"):
            client.send(text_input=key, max_tokens=500, stream=True, request_id=key)
        texts: dict[str, str] = {}
        running = 3
        while running:
            response = client.next()
            assert response.error is None
            texts[response.request_id] = texts.get(response.request_id, "") + response.text
            running -= response.final
    assert texts["emoji"] == script("emoji").text
    assert texts["hello"] == script("hello").text
    assert script("long").text.startswith(texts["long"])
