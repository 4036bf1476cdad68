"""`session_id` makes a request a turn of an interactive session."""

from typing import Any

import openai
import pytest

from tests.client.fake_server import FakeServer
from tests.client.session_server import SessionServer


@pytest.fixture(autouse=True)
def sessions(server: FakeServer) -> SessionServer:
    kept = SessionServer()
    server.answer = kept.answer
    return kept


def say(ask: openai.OpenAI, text: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return ask.chat.completions.create(model="tiny", messages=messages, extra_body=fields)  # type: ignore[call-overload]


def test_turns_send_what_is_new_and_the_server_keeps_the_rest(ask: openai.OpenAI, sessions: SessionServer) -> None:
    assert say(ask, "one", session_id="s").choices[0].message.content == "<one>"
    answer = say(ask, "two", session_id="s")
    assert answer.choices[0].message.content == "<two>"
    kept = sessions.sessions["s"]
    assert len(kept.turns) == 2
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == len(kept.history)


def test_a_session_is_begun_anew_on_request(ask: openai.OpenAI, sessions: SessionServer) -> None:
    say(ask, "one", session_id="s")
    say(ask, "two", session_id="s", session_start=True)
    assert len(sessions.sessions["s"].turns) == 1


def test_a_session_that_must_be_there_is_not_begun(ask: openai.OpenAI, sessions: SessionServer) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        say(ask, "one", session_id="s", session_start=False)
    assert refused.value.code == "session_not_found"
    assert not sessions.sessions


def test_a_busy_session_is_a_conflict(ask: openai.OpenAI, sessions: SessionServer) -> None:
    say(ask, "one", session_id="s")
    sessions.sessions["s"].running = True
    with pytest.raises(openai.ConflictError) as refused:
        say(ask, "two", session_id="s")
    assert refused.value.code == "session_busy"


def test_rewind_reaches_the_server(server: FakeServer, ask: openai.OpenAI) -> None:
    say(ask, "one", session_id="s")
    say(ask, "two", session_id="s", session_rewind=1)
    assert server.asked[-1].parameters["session_rewind"] == 1
    with pytest.raises(openai.NotFoundError):
        say(ask, "two", session_id="not begun", session_rewind=1)
