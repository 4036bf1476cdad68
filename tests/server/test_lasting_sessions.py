"""Sessions through tritonserver that are stored, forked, and too long for the context."""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from limpet.client import Client, SessionNotFound
from tests.aids.chain import script
from tests.aids.live_server import LiveServer, live_server
from tests.client.chat_process import WAIT_S, command

pytestmark = pytest.mark.server
ENGINE = "limpet.backend.engine_process"
SESSION_LEN = 160


@pytest.fixture(scope="module")
def lasting(edited_chain: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that stores sessions and drops the oldest turns of a full context."""
    store = tmp_path_factory.mktemp("store") / "sessions.db"
    repository = edited_chain(*_setting("session_store", "", str(store)))
    config = repository / "chain" / "config.pbtxt"
    text = config.read_text("utf-8")
    for edit in (
        _setting("session_len", "", str(SESSION_LEN)),
        _setting("context_overflow", "error", "drop_oldest_turns"),
    ):
        assert text.count(edit[0]) == 1
        text = text.replace(*edit)
    config.write_text(text, "utf-8")
    with live_server(repository) as server:
        server.wait_ready()
        yield server
        assert server.stop() == 0


def _setting(name: str, old: str, new: str) -> tuple[str, str]:
    setting = f'key: "{name}" value {{ string_value: "%s" }}'
    return setting % old, setting % new


@pytest.fixture
def client(lasting: LiveServer) -> Iterator[Client]:
    with Client(lasting.target) as client:
        yield client


def test_a_session_survives_kill_9_of_the_engine(lasting: LiveServer, client: Client) -> None:
    session = client.session(replay=False)
    tokens = session.ask("hello").session_tokens
    ended = client.session(replay=False)
    ended.ask("hello")
    state = ended.state
    ended.end()
    lasting.only(ENGINE).kill()
    deadline = time.monotonic() + WAIT_S
    while not client.ready():
        assert time.monotonic() < deadline, "no new engine came"
        time.sleep(0.1)
    result = session.ask("emoji")
    assert (result.text, result.replayed) == (script("emoji").text, False)
    assert result.session_tokens == (tokens or 0) + result.num_input_tokens + result.num_output_tokens
    with pytest.raises(SessionNotFound):
        client.session(state=state, replay=False).ask("hello")


def test_forks_share_the_past_and_the_command_shows_them(lasting: LiveServer, client: Client) -> None:
    with client.session() as session:
        tokens = session.ask("hello").session_tokens
        with session.fork() as twin:
            for each, key in ((session, "spaces"), (twin, "emoji")):
                result = each.ask(key)
                assert result.text == script(key).text
                assert result.num_cached_tokens == (tokens or 0) - 1
            shown = subprocess.run(
                [command("limpet-sessions"), lasting.target, "list"], capture_output=True, text=True, timeout=WAIT_S
            )
            assert {session.id, twin.id} <= {line.split()[0] for line in shown.stdout.splitlines()}


def test_a_full_context_drops_the_oldest_turns_and_says_how_many(client: Client) -> None:
    with client.session(system="Say what you are told.") as session:
        results = [session.ask("hello") for _ in range(20)]
        assert {result.text for result in results} == {script("hello").text}
        assert not any(result.replayed for result in results)
        dropping = [result for result in results if result.num_dropped_turns]
        assert len(dropping) > 1
        assert all(result.num_cached_tokens > 0 for result in dropping), "the system prompt was not kept"
        assert max(result.session_tokens or 0 for result in results) <= SESSION_LEN
        session.rewind()
        assert session.ask("emoji").text == script("emoji").text
