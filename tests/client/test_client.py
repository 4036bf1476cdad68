"""The blocking client against scripted answers."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from limpet.client import (
    Cancelled,
    Client,
    ConnectionLost,
    InvalidRequest,
    LimpetError,
    NotFound,
    QueueFull,
    RequestTimeout,
    ServerError,
    SessionBusy,
    SessionNotFound,
    Unavailable,
)
from tests.client.fake_server import Asked, FakeServer, Response, data, error, fake_server


def one_token_then_silence(asked: Asked) -> Iterator[Response]:
    yield data("x")
    asked.gone.wait(60)


def test_an_answer_comes_whole_with_its_counts(server: FakeServer, client: Client) -> None:
    server.answer = lambda asked: iter(
        [data("Ja, 好 ", ids=(5, 6), num_cached=2), data("🐚", "length", ids=(9,), num_cached=2)]
    )
    result = client.generate("Hi")
    assert (result.text, result.output_ids, result.finish_reason) == ("Ja, 好 🐚", (5, 6, 9), "length")
    assert (result.num_input_tokens, result.num_output_tokens, result.num_cached_tokens) == (3, 3, 2)
    assert result.ttft_s is not None
    assert 0 < result.ttft_s <= result.duration_s


def test_a_stream_gives_each_response_as_a_chunk_and_the_whole_at_the_end(client: Client) -> None:
    stream = client.generate("Hi", stream=True)
    assert [(chunk.text, chunk.finish_reason) for chunk in stream] == [("Hello ", None), ("world", "stop")]
    assert list(stream) == []
    assert stream.result.text == "Hello world"
    assert stream.result.finish_reason == "stop"


def test_the_request_carries_prompt_options_and_flags(server: FakeServer, client: Client) -> None:
    client.generate(
        "é\0x", stream=True, temperature=0.5, stop=["a", "ß"], seed=2**63, top_k=None, apply_chat_template=True
    ).read()
    (asked,) = server.asked
    assert asked.model == "tiny"
    assert asked.inputs["text_input"] == "é\0x"
    assert asked.inputs["stream"] is True
    assert asked.options == {"temperature": 0.5, "stop": ["a", "ß"], "seed": 2**63}
    assert asked.parameters == {"apply_chat_template": True}
    assert all(asked.inputs[f"return_{name}"] for name in ("finish_reason", "output_ids", "num_cached_tokens"))
    assert "return_session_tokens" not in asked.inputs


def test_token_ids_and_messages_can_be_sent_instead_of_text(server: FakeServer, client: Client) -> None:
    client.generate(input_ids=[1, 2, 300])
    client.chat([{"role": "user", "content": "Grüße"}], max_tokens=5)
    assert server.asked[0].inputs["input_ids"] == [1, 2, 300]
    assert "text_input" not in server.asked[0].inputs
    assert server.asked[1].messages == [{"role": "user", "content": "Grüße"}]
    assert server.asked[1].inputs["stream"] is False


def test_request_ids_are_unique_and_known_before_the_end(server: FakeServer, client: Client) -> None:
    streams = [client.generate("Hi", stream=True) for _ in range(2)]
    results = [stream.read() for stream in streams]
    assert [stream.request_id for stream in streams] == [result.request_id for result in results]
    assert {asked.request_id for asked in server.asked} == {result.request_id for result in results}
    assert len({result.request_id for result in results}) == 2


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        ("[INVALID_ARG] temperature is -1: 0 or more.", InvalidRequest, "temperature is -1: 0 or more."),
        ("[request id: 7] [INVALID_ARG] two\nlines", InvalidRequest, "two\nlines"),
        ("[NOT_FOUND] No adapter x.", NotFound, "No adapter x."),
        ("[NOT_FOUND] Session not found: it expired.", SessionNotFound, "Session not found: it expired."),
        ("[UNAVAILABLE] The queue is full.", QueueFull, "The queue is full."),
        ("[UNAVAILABLE] Session busy.", SessionBusy, "Session busy."),
        ("[CANCELLED] Gone.", Cancelled, "Gone."),
        ("[INTERNAL] Broken.", ServerError, "Broken."),
        ("Request for unknown model: 'nix' is not found", NotFound, "Request for unknown model: 'nix' is not found"),
        (
            "Request for unknown model: 'a' has no available versions",
            Unavailable,
            "Request for unknown model: 'a' has no available versions",
        ),
        (
            "Failed to process the request(s), Stub process 'm_0' is not healthy.",
            Unavailable,
            "Failed to process the request(s), Stub process 'm_0' is not healthy.",
        ),
        (
            "unexpected inference input 'x' for model 'tiny'",
            InvalidRequest,
            "unexpected inference input 'x' for model 'tiny'",
        ),
    ],
)
def test_an_error_text_becomes_the_exception_of_its_kind(
    server: FakeServer, client: Client, text: str, kind: type[LimpetError], sentence: str
) -> None:
    server.answer = lambda asked: iter([error(text)])
    with pytest.raises(kind) as caught:
        client.generate("Hi")
    assert type(caught.value) is kind
    assert str(caught.value) == sentence


def test_an_error_in_the_middle_ends_the_stream_and_leaves_what_had_arrived(server: FakeServer, client: Client) -> None:
    server.answer = lambda asked: iter([data("a"), error("[INTERNAL] Broken.")])
    stream = client.generate("Hi", stream=True)
    assert next(stream).text == "a"
    with pytest.raises(ServerError):
        next(stream)
    assert list(stream) == []
    assert (stream.result.text, stream.result.finish_reason) == ("a", None)


def test_a_stream_without_a_final_response_is_an_error(server: FakeServer, client: Client) -> None:
    server.answer = lambda asked: iter([data("a")])
    with pytest.raises(ConnectionLost, match="before the answer was complete"):
        client.generate("Hi")


def test_no_server_is_connection_lost_at_once() -> None:
    with fake_server() as server:
        target = server.target
    with Client(target, model="tiny") as client, pytest.raises(ConnectionLost, match=target):
        client.generate("Hi")


def test_a_server_that_dies_breaks_the_stream_off_and_its_successor_is_found(
    server: FakeServer, client: Client
) -> None:
    server.answer = one_token_then_silence
    stream = client.generate("Hi", stream=True)
    assert next(stream).text == "x"
    server.die()
    with pytest.raises(ConnectionLost):
        next(stream)
    with fake_server(server.port):
        assert client.generate("Hi").text == "Hello world"


def test_a_server_that_falls_silent_for_good_is_noticed(
    server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("limpet.client.call.PROBE_AFTER_S", 0.1)
    monkeypatch.setattr("limpet.client.connection.PROBE_TIMEOUT_S", 0.1)
    server.answer = one_token_then_silence
    server.live.clear()
    with pytest.raises(ConnectionLost, match="stopped answering"):
        client.generate("Hi")
    server.live.set()


def test_a_slow_answer_of_a_living_server_is_waited_for(
    server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("limpet.client.call.PROBE_AFTER_S", 0.01)
    probed = threading.Event()
    monkeypatch.setattr(server.live, "wait", lambda timeout: probed.set())

    def slow(asked: Asked) -> Iterator[Response]:
        assert probed.wait(60)
        yield data("late", "stop")

    server.answer = slow
    assert client.generate("Hi").text == "late"


def test_the_timeout_ends_a_request(server: FakeServer) -> None:
    server.answer = one_token_then_silence
    with Client(server.target, timeout_s=0.2) as client, pytest.raises(RequestTimeout):
        client.generate("Hi")


def test_closing_a_stream_cancels_it_on_the_server_and_ends_the_iteration(server: FakeServer, client: Client) -> None:
    server.answer = one_token_then_silence
    with client.generate("Hi", stream=True) as stream:
        next(stream)
    assert server.asked[0].gone.wait(30)
    assert list(stream) == []
    assert stream.result.text == "x"


def test_a_dropped_stream_is_cancelled(server: FakeServer, client: Client) -> None:
    server.answer = one_token_then_silence
    for _ in client.generate("Hi", stream=True):
        break
    assert server.asked[0].gone.wait(30)


def test_a_finished_stream_is_read_to_its_natural_end(server: FakeServer, client: Client) -> None:
    drained = threading.Event()

    def answer(asked: Asked) -> Iterator[Response]:
        yield data("all", "stop")
        drained.set()  # only reached if the client still listens

    server.answer = answer
    stream = client.generate("Hi", stream=True)
    next(stream)
    assert drained.is_set()


def test_closing_the_client_cancels_what_other_threads_wait_for(server: FakeServer) -> None:
    server.answer = one_token_then_silence
    client = Client(server.target, model="tiny")
    streams = [client.generate("Hi", stream=True) for _ in range(3)]
    for stream in streams:
        next(stream)
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(next, stream) for stream in streams]
        client.close()
        for future in waiting:
            with pytest.raises(Cancelled):
                future.result(30)
    with pytest.raises(Cancelled, match="closed"):
        client.generate("Hi")


def test_closing_the_client_after_an_error_does_not_hang(server: FakeServer) -> None:
    server.answer = lambda asked: iter([error("[INTERNAL] Broken.")])
    client = Client(server.target)
    with pytest.raises(ServerError):
        client.generate("Hi")
    client.close()


def test_many_threads_share_one_client(server: FakeServer, client: Client) -> None:
    server.answer = lambda asked: iter([data(asked.inputs["text_input"]), data("!", "stop")])
    with ThreadPoolExecutor(16) as threads:
        results = list(threads.map(lambda number: client.generate(f"q{number}").text, range(64)))
    assert results == [f"q{number}!" for number in range(64)]


def test_the_only_model_is_found_aliases_with_a_batch_dimension_left_out(server: FakeServer, client: Client) -> None:
    server.models = {"tiny": 0, "ensemble": 1}
    assert client.models() == ["tiny"]
    assert client.generate("Hi").text == "Hello world"


def test_several_models_have_to_be_named(server: FakeServer, client: Client) -> None:
    server.models = {"one": 0, "two": 0}
    with pytest.raises(InvalidRequest, match="one, two"):
        client.generate("Hi")
    with Client(server.target, model="two") as named:
        named.generate("Hi")
    assert server.asked[0].model == "two"


def test_one_connection_serves_several_models(server: FakeServer, client: Client) -> None:
    server.models = {"one": 0, "two": 0}
    client.for_model("two").generate("Hi")
    client.for_model("one").generate("Hi")
    assert [asked.model for asked in server.asked] == ["two", "one"]


def test_a_server_without_models_says_so(server: FakeServer, client: Client) -> None:
    server.models = {}
    with pytest.raises(NotFound, match="no Limpet model"):
        client.generate("Hi")


@pytest.mark.parametrize("address", ["", "localhost", ":8001", "host:", "host:0", "host:70000", "host:x"])
def test_an_address_must_be_host_and_port(address: str) -> None:
    with pytest.raises(InvalidRequest, match="HOST:PORT"):
        Client(address)


def test_what_cannot_be_sent_is_refused_before_sending(server: FakeServer, client: Client) -> None:
    for call in (
        lambda: client.generate("\ud83d"),
        lambda: client.chat([{"role": "user", "content": "\ud83d"}]),
        lambda: client.generate("Hi", temperature=float("nan")),
        lambda: client.generate(input_ids=[2**31]),
        lambda: client.chat([{"role": "user", "content": object()}]),
        lambda: client.generate([5, 6]),  # type: ignore[call-overload]
        lambda: client.generate(5),  # type: ignore[call-overload]
        lambda: client.generate("Hi", apply_chat_template="yes"),  # type: ignore[call-overload]
        *(partial(client.generate, input_ids=ids) for ids in (["a"], [1.5], [True], [None], "ab", 5, [[1], [2, 3]])),
        *(partial(client.chat, messages) for messages in ("Hi", 5, ["Hi"], {"role": "user", "content": "Hi"})),
        *(partial(client.session(system=system).ask, 5) for system in (None, "S")),
        lambda: client.session(id=5).ask("Hi"),  # type: ignore[arg-type]
        *(partial(client.session(id=name).ask, "Hi") for name in ("0", "cut\0here", "\ud83d", "🐚" * 33)),
    ):
        with pytest.raises(InvalidRequest):
            call()
    assert server.asked == []


def test_admin_operations_carry_model_and_key_and_give_the_answer(server: FakeServer) -> None:
    server.admin = lambda operation: {"ready": True, "op": operation["op"], "cancelled": 2}
    with Client(server.target, model="tiny", admin_key="secret") as client:
        assert client.status()["op"] == "status"
        assert client.cancel(request_id="7") == 2
        assert client.cancel(session_id="8") == 2
        assert client.ready()
    key = {"model": "tiny", "admin_key": "secret"}
    assert server.operations[:3] == [
        {"op": "status", **key},
        {"op": "cancel", "request_id": "7", **key},
        {"op": "cancel", "session_id": "8", **key},
    ]


def test_not_ready_has_a_reason(server: FakeServer, client: Client) -> None:
    server.admin = lambda operation: {"ready": False, "reason": "The engine is starting."}
    assert client.why_not_ready() == "The engine is starting."
    assert not client.ready()
    server.die()
    assert "No connection" in (client.why_not_ready() or "")
