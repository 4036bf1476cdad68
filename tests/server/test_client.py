"""limpet.client against a real server: what the fake one of tests/client cannot prove."""

import asyncio
import time
import uuid
from collections.abc import Iterator

import pytest

from limpet.client import AsyncClient, Cancelled, Client, InvalidRequest, NotFound, SessionBusy, SessionNotFound
from tests.aids.chain import script
from tests.aids.live_server import LiveServer
from tests.aids.wire import wire

pytestmark = pytest.mark.server


@pytest.fixture
def client(chain: LiveServer) -> Iterator[Client]:
    with Client(chain.target) as client:
        yield client


def test_streamed_and_whole_answers_are_the_scripts(client: Client) -> None:
    assert client.generate("emoji", max_tokens=200).text == script("emoji").text
    with client.generate("long", stream=True, max_tokens=500) as stream:
        texts = [chunk.text for chunk in stream]
    assert "".join(texts) == stream.result.text
    assert script("long").text.startswith(stream.result.text)
    assert len(texts) > 1


def test_turns_of_a_session_pay_only_for_their_new_tokens(client: Client) -> None:
    with client.session(system="Say what you are told.") as session:
        history = 0
        for key in ("hello", "spaces", "code"):
            result = session.ask(key)
            assert result.text == script(key).text
            assert result.num_cached_tokens == max(history - 1, 0)
            history = session.history_tokens or 0
        assert [kept["tokens"] for kept in client.sessions() if kept["session_id"] == session.id] == [history]


def test_cancel_ends_the_answer_and_both_sides_agree_on_the_history(client: Client) -> None:
    with client.session() as session:
        stream = session.ask("loop", stream=True)
        received = next(stream).text
        session.cancel()
        received += "".join(chunk.text for chunk in stream)
        assert stream.result.finish_reason == "cancelled"
        assert received == stream.result.text
        tokens = session.history_tokens
        assert session.ask("hello").num_cached_tokens == (tokens or 0) - 1


def test_cancel_finds_a_question_that_is_still_on_its_way(client: Client) -> None:
    with client.session(system="Say what you are told.") as session:
        session.ask("hello")
        for delay_ms in range(12):
            before = session.history_tokens or 0
            stream = session.ask(f"{'word ' * 400 * (delay_ms % 3)}loop", stream=True)
            time.sleep(delay_ms / 1000)
            session.cancel()
            assert stream.read().finish_reason == "cancelled"
            assert (session.history_tokens or 0) > before, "the history and the question stay"
        tokens = session.history_tokens or 0
        assert session.ask("hello").session_tokens > tokens


def test_a_turn_past_its_time_limit_keeps_what_was_received(client: Client) -> None:
    with client.session() as session:
        stream = session.ask("loop", stream=True, timeout_ms=200)
        with pytest.raises(Cancelled, match="timeout_ms"):
            stream.read()
        assert stream.result.text.startswith("tick0 ")
        assert session.ask("hello").num_cached_tokens == (stream.result.session_tokens or 0) - 1


def test_prefixes_are_shared_only_where_the_salt_is_equal(client: Client) -> None:
    prompt = f"hello {uuid.uuid4()} {'word ' * 200}"
    cached = [client.generate(prompt, max_tokens=1, cache_salt=salt).num_cached_tokens for salt in ("a", "a", "b", "")]
    assert cached[1] > 0
    assert (cached[0], cached[2], cached[3]) == (0, 0, 0)


def test_ids_of_clients_forge_no_line_of_the_log(chain: LiveServer) -> None:
    with wire(chain.target, "chain") as connection:
        connection.send(
            text_input="hello", request_id="x\nforged=1", sequence_id="y\r\nforged=2", sequence_start=True, stream=True
        )
        assert not [response.error for response in connection.rest() if response.error]
    deadline = time.monotonic() + 10  # the engine logs an end after the front end has answered
    while not (lines := [line for line in chain.log().splitlines() if "forged=1" in line]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    [line] = lines
    assert "event=request_end" in line
    assert "forged=2" in line


def test_a_closed_stream_is_followed_by_the_next_question_at_once(client: Client) -> None:
    with client.session() as session:
        for _ in range(5):
            with session.ask("loop", stream=True) as stream:
                next(stream)
            assert session.ask("hello").text == script("hello").text


def test_rewound_turns_are_forgotten(client: Client) -> None:
    with client.session() as session:
        first = session.ask("hello").session_tokens
        session.ask("emoji")
        session.ask("spaces")
        session.rewind(2)
        again = session.ask("code")
        assert again.num_cached_tokens <= (first or 0)
        assert again.session_tokens == (first or 0) + again.num_input_tokens + again.num_output_tokens
        assert again.replayed is False


def test_a_session_that_the_server_has_lost_is_replayed(client: Client) -> None:
    with client.session(system="S") as session:
        session.ask("hello")
        client.admin("sessions", action="end", session_id=session.id)
        result = session.ask("emoji")
        assert (result.text, result.replayed) == (script("emoji").text, True)
        client.admin("sessions", action="end", session_id=session.id)
        lasting = client.session(state=session.state, replay=False)
        with pytest.raises(SessionNotFound):
            lasting.ask("hello")


def test_a_session_answers_one_question_at_a_time(client: Client) -> None:
    with client.session() as session, session.ask("loop", stream=True) as running:
        next(running)
        with pytest.raises(SessionBusy):
            client.session(state=session.state, replay=False).ask("hello")


def test_errors_have_their_kind(chain: LiveServer, client: Client) -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        client.generate("hello", temperature=-1.0)
    with pytest.raises(InvalidRequest):
        client.generate("")
    with Client(chain.target, model="nix") as other, pytest.raises(NotFound, match="nix"):
        other.generate("hello")


def test_asyncio_client_answers_many_at_once(chain: LiveServer) -> None:
    async def ask_all() -> list[str]:
        async with AsyncClient(chain.target) as client:
            results = await asyncio.gather(*(client.generate("emoji", max_tokens=200) for seed in range(32)))
            return [result.text for result in results]

    assert asyncio.run(ask_all()) == [script("emoji").text] * 32
