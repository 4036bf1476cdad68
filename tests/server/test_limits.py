"""A server with small limits: a short queue, sessions that expire soon, and a log that may show prompts.

All three are parameters of one model, so one server serves these tests.
"""

import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.aids.chain import script
from tests.aids.live_server import LiveServer, live_server
from tests.aids.wire import await_engine, text_of, wire

pytestmark = pytest.mark.server
SLOTS, QUEUE = 2, 3
LOGGED_WITHIN_S = EXPIRED_WITHIN_S = 30.0


@pytest.fixture(scope="module")
def limited(chain_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    repository = tmp_path_factory.mktemp("limited") / "repository"
    shutil.copytree(chain_repository, repository)
    config = repository / "chain" / "config.pbtxt"
    text = config.read_text("utf-8")
    limits = {"max_batch_size": SLOTS, "max_waiting": QUEUE, "session_idle_timeout_s": 0.5, "log_prompts": "true"}
    for name, value in limits.items():
        text, count = re.subn(rf'(key: "{name}" value {{ string_value: )"[^"]*"', rf'\1"{value}"', text)
        assert count == 1, name
    config.write_text(text, "utf-8")
    with live_server(repository, ["--drain-deadline=5"]) as server:
        server.wait_ready()
        yield server
        assert server.stop() == 0


def test_request_past_the_queue_is_refused_at_once_and_those_in_it_are_served(limited: LiveServer) -> None:
    with wire(limited.target, "chain") as queued, wire(limited.target, "chain") as late:
        with wire(limited.target, "chain") as holders:
            for number in range(SLOTS):
                holders.send(text_input="loop", max_tokens=50_000, stream=True, request_id=str(number))
            begun: set[str] = set()
            while len(begun) < SLOTS:
                begun.add(holders.next().request_id)
            for number in range(QUEUE):
                queued.send(text_input="hello", max_tokens=100, request_id=str(number))
            await_engine(limited.http, "chain", running=SLOTS, waiting=QUEUE)
            [refusal] = late.ask(text_input="hello", max_tokens=100)
        assert f"[UNAVAILABLE] The queue is full ({QUEUE} requests wait)" in (refusal.error or "")
        answers = [queued.next() for _ in range(QUEUE)]
    assert {answer.request_id for answer in answers} == {str(number) for number in range(QUEUE)}
    assert {text_of([answer]) for answer in answers} == {script("hello").text}


def test_idle_session_expires_and_the_next_turn_says_so(limited: LiveServer) -> None:
    session = uuid.uuid4().hex
    with wire(limited.target, "chain") as client:
        text_of(client.ask(text_input="hello", sequence_id=session, sequence_start=True))
        time.sleep(1.0)  # twice the idle time; a turn sent sooner would only begin it again
        deadline = time.monotonic() + EXPIRED_WITHIN_S
        while (last := client.ask(text_input="hello", sequence_id=session)[-1]).error is None:
            assert time.monotonic() < deadline, "the session does not expire"
            time.sleep(1.0)
    assert "[NOT_FOUND] Session not found: it was idle for" in last.error


@pytest.mark.parametrize("shown", [False, True], ids=["by default", "where log_prompts is set"])
def test_log_has_a_line_for_each_request_and_its_prompt_only_if_asked(
    request: pytest.FixtureRequest, shown: bool
) -> None:
    server: LiveServer = request.getfixturevalue("limited" if shown else "chain")
    name, secret = uuid.uuid4().hex, uuid.uuid4().hex
    with wire(server.target, "chain") as client:
        text_of(client.ask(text_input=secret, max_tokens=1, request_id=name))
        text_of(client.ask(text_input=secret, max_tokens=1, sequence_id=name, sequence_start=True, sequence_end=True))
    deadline = time.monotonic() + LOGGED_WITHIN_S
    while (log := server.log_path.read_text("utf-8")).count(name) < 2:
        assert time.monotonic() < deadline, log[-2000:]
        time.sleep(0.1)
    assert (secret in log) == shown
