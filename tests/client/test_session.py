"""Sessions: transcript, what the server is told of the history, rewind, replay."""

from collections.abc import Iterator

import pytest

from limpet.client import Client, ConnectionLost, InvalidRequest, SessionNotFound, SessionState
from tests.client.fake_server import Asked, FakeServer, Response, data, error
from tests.client.session_server import SessionServer, as_json


@pytest.fixture
def kept(server: FakeServer) -> SessionServer:
    """The sessions that `server` keeps."""
    sessions = SessionServer()
    server.answer, server.admin = sessions.answer, sessions.admin
    return sessions


def roles(transcript: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in transcript]


def test_turns_append_on_the_server_and_pay_only_for_new_tokens(
    server: FakeServer, kept: SessionServer, client: Client
) -> None:
    session = client.session(system="S")
    first = session.ask("one")
    second = session.ask("two")
    assert (first.text, second.text) == ("<one>", "<two>")
    assert kept.sessions[session.id].history == "s:S;u:one;<one>u:two;<two>"
    assert second.num_cached_tokens == first.session_tokens - 1
    assert (second.num_input_tokens, second.replayed) == (len("u:two;"), False)
    assert session.history_tokens == second.session_tokens == len(kept.sessions[session.id].history)
    assert roles(session.transcript) == [
        ("system", "S"), ("user", "one"), ("assistant", "<one>"), ("user", "two"), ("assistant", "<two>"),
    ]  # fmt: skip
    assert [asked.parameters["sequence_start"] for asked in server.asked] == [True, False]
    assert server.asked[1].parameters["session_tokens"] == first.session_tokens


def test_a_first_question_without_system_prompt_goes_as_text_so_that_models_without_template_work(
    server: FakeServer, kept: SessionServer, client: Client
) -> None:
    client.session().ask("a")
    assert server.asked[0].inputs["text_input"] == "a"
    assert "messages" not in server.asked[0].inputs


def test_ids_are_random_128_bits(client: Client) -> None:
    ids = {client.session().id for _ in range(100)}
    assert len(ids) == 100
    assert all(len(id) == 32 and int(id, 16) >= 0 for id in ids)


def test_a_fork_and_its_origin_go_their_own_ways(server: FakeServer, kept: SessionServer, client: Client) -> None:
    session = client.session(system="S")
    session.ask("one")
    twin = session.fork()
    assert (session.ask("left").text, twin.ask("right").text) == ("<left>", "<right>")
    assert kept.sessions[session.id].history == "s:S;u:one;<one>u:left;<left>"
    assert kept.sessions[twin.id].history == "s:S;u:one;<one>u:right;<right>"
    assert [roles(each.transcript)[-1] for each in (session, twin)] == [
        ("assistant", "<left>"),
        ("assistant", "<right>"),
    ]
    assert not any(asked.parameters["sequence_start"] for asked in server.asked[1:])


def test_a_fork_of_what_the_server_has_lost_is_replayed(
    server: FakeServer, kept: SessionServer, client: Client
) -> None:
    session = client.session()
    session.ask("one")
    server.refusal = "[NOT_FOUND] Session not found: it expired."
    twin = session.fork()
    assert twin.ask("two").replayed
    assert kept.sessions[twin.id].history == "u:one;a:<one>;u:two;<two>"


def test_dropped_turns_are_told_and_no_longer_rewound_on_the_server(
    server: FakeServer, kept: SessionServer, client: Client
) -> None:
    session = client.session()
    session.ask("one")
    session.ask("two")
    server.answer = lambda asked: iter([data("three", "stop", session_tokens=9, num_dropped=1)])
    result = session.ask("3", context_overflow="drop_oldest_turns")
    assert server.asked[-1].options == {"context_overflow": "drop_oldest_turns"}
    assert server.asked[-1].parameters["return_num_dropped_turns"] is True
    assert (result.num_dropped_turns, "no longer fit: 1" in result.summary()) == (1, True)
    server.answer = kept.answer
    session.rewind()
    assert session.ask("four").replayed
    assert kept.sessions[session.id].history == "u:one;a:<one>;u:two;a:<two>;u:four;<four>"


def test_several_messages_are_a_turn_too(kept: SessionServer, client: Client) -> None:
    session = client.session()
    session.ask("weather?")
    session.ask([{"role": "tool", "content": "rain"}, {"role": "user", "content": "so?"}])
    assert kept.sessions[session.id].history.endswith("t:rain;u:so?;<so?>")
    session.rewind()
    assert roles(session.transcript) == [("user", "weather?"), ("assistant", "<weather?>")]


def test_a_closed_stream_keeps_what_was_received_on_both_sides(
    server: FakeServer, kept: SessionServer, client: Client
) -> None:
    session = client.session()
    stream = session.ask("question", stream=True)
    received = next(stream).text + next(stream).text
    stream.close()
    assert server.asked[0].gone.wait(30)
    session.ask("next", stream=True).read()
    assert kept.sessions[session.id].history == f"u:question;{received}u:next;<next>"
    assert session.transcript[1]["content"] == received == "<q"


def test_cancel_ends_the_running_answer_with_its_counts(kept: SessionServer, client: Client) -> None:
    session = client.session()
    kept.pause = lambda each: each.cancel.wait(60) if each.history.endswith("<qu") else None
    stream = session.ask("question", stream=True)
    chunks = [next(stream) for _ in range(3)]
    session.cancel()
    chunks += stream
    assert (stream.result.text, stream.result.finish_reason) == ("<qu", "cancelled")
    assert session.history_tokens == len("u:question;<qu")
    assert session.ask("b").text == "<b>"


def test_rewind_drops_turns_here_and_on_the_server(server: FakeServer, kept: SessionServer, client: Client) -> None:
    session = client.session()
    for question in "abc":
        session.ask(question)
    session.rewind()
    session.rewind()
    assert roles(session.transcript) == [("user", "a"), ("assistant", "<a>")]
    session.ask("B")
    assert kept.sessions[session.id].history == "u:a;<a>u:B;<B>"
    assert server.asked[-1].parameters["session_rewind"] == 2
    session.ask("C")
    assert "session_rewind" not in server.asked[-1].parameters


def test_rewinding_everything_begins_the_session_again(kept: SessionServer, client: Client) -> None:
    session = client.session(system="S")
    session.ask("a")
    session.rewind()
    assert roles(session.transcript) == [("system", "S")]
    assert session.ask("b").replayed is False
    assert kept.sessions[session.id].history == "s:S;u:b;<b>"
    with pytest.raises(ValueError, match="has 1"):
        session.rewind(2)


def test_a_lost_session_is_replayed_from_the_transcript_once(
    server: FakeServer, kept: SessionServer, client: Client
) -> None:
    session = client.session(system="S")
    session.ask("a")
    kept.sessions.clear()
    stream = session.ask("b", stream=True)
    result = stream.read()
    assert (result.text, result.replayed) == ("<b>", True)
    assert kept.sessions[session.id].history == "s:S;u:a;a:<a>;u:b;<b>"
    assert session.ask("c").replayed is False
    assert len(server.asked) == 4


def test_rewinding_past_a_replay_starts_from_the_transcript(kept: SessionServer, client: Client) -> None:
    session = client.session()
    for question in "ab":
        session.ask(question)
    kept.sessions.clear()
    session.ask("c")
    session.rewind(2)  # the server knows the replay and "c" as one turn
    session.ask("B")
    assert kept.sessions[session.id].history == "u:a;a:<a>;u:B;<B>"


def test_without_replay_a_lost_session_is_an_error(kept: SessionServer, client: Client) -> None:
    session = client.session(replay=False)
    session.ask("a")
    kept.sessions.clear()
    with pytest.raises(SessionNotFound, match="expired"):
        session.ask("b")
    assert roles(session.transcript) == [("user", "a"), ("assistant", "<a>")]


def test_a_server_that_finds_no_session_even_at_the_start_is_asked_once(server: FakeServer, client: Client) -> None:
    server.answer = lambda asked: iter([error("[NOT_FOUND] session not found")])
    with pytest.raises(SessionNotFound):
        client.session().ask("a")
    assert len(server.asked) == 1


def test_a_refused_question_changes_nothing(server: FakeServer, kept: SessionServer, client: Client) -> None:
    session = client.session()
    for question in "ab":
        session.ask(question)
    session.rewind()
    server.answer = lambda asked: iter([error("[INVALID_ARG] The prompt does not fit.")])
    with pytest.raises(InvalidRequest):
        session.ask("too long")
    server.answer = kept.answer
    session.ask("c")
    assert kept.sessions[session.id].history == "u:a;<a>u:c;<c>"


def test_a_turn_of_unknown_fate_after_a_rewind_begins_the_session_again(
    server: FakeServer, kept: SessionServer, client: Client
) -> None:
    session = client.session()
    for question in "abc":
        session.ask(question)
    session.rewind(2)
    server.answer = lambda asked: iter([])
    with pytest.raises(ConnectionLost):
        session.ask("lost")
    server.answer = kept.answer
    session.ask("d")
    assert kept.sessions[session.id].history == "u:a;a:<a>;u:d;<d>"


def test_a_first_turn_of_unknown_fate_is_begun_again(server: FakeServer, kept: SessionServer, client: Client) -> None:
    session = client.session(system="S")
    server.answer = lambda asked: iter([])
    with pytest.raises(ConnectionLost):
        session.ask("lost")
    server.answer = kept.answer
    assert session.ask("a").replayed is False
    assert kept.sessions[session.id].history == "s:S;u:a;<a>"


def test_the_state_takes_a_session_into_another_client(kept: SessionServer, server: FakeServer) -> None:
    with Client(server.target) as client:
        session = client.session(system="S")
        for question in "ab":
            session.ask(question)
        state: SessionState = as_json(session.state)
    with Client(server.target) as client:
        session = client.session(state=state)
        assert session.ask("c").replayed is False
        session.rewind(2)
        session.ask("B")
    assert kept.sessions[session.id].history == "s:S;u:a;<a>u:B;<B>"


def test_end_frees_the_session_and_a_later_question_begins_it_again(kept: SessionServer, client: Client) -> None:
    with client.session() as session:
        session.ask("a")
        assert session.id in kept.sessions
    assert kept.sessions == {}
    assert session.ask("b").replayed is True


def test_leaving_the_block_when_the_server_is_gone_raises_nothing(
    server: FakeServer, kept: SessionServer, client: Client
) -> None:
    with client.session() as session:
        session.ask("a")
        server.die()


def test_a_server_error_in_the_middle_keeps_what_had_arrived(
    server: FakeServer, kept: SessionServer, client: Client
) -> None:
    def breaks(asked: Asked) -> Iterator[Response]:
        yield data("ab", session_tokens=7)
        yield error("[INTERNAL] Broken.")

    server.answer = breaks
    session = client.session()
    with pytest.raises(Exception, match="Broken"):
        session.ask("q", stream=True).read()
    assert roles(session.transcript) == [("user", "q"), ("assistant", "ab")]
    server.answer = kept.answer
    assert session.ask("next").replayed is True  # the fake never kept that session
