"""The session store: what comes back, what one commit holds, and files that cannot be used."""

import os
import resource
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from limpet.backend.history import History, Turn, token_array
from limpet.backend.link.messages import BeginTurn, Failed, Hello, Message, Outputs, Settle, Settled, Submit, pack_ids
from limpet.backend.link.router import Connection
from limpet.backend.sampling_params import SamplingParams
from limpet.backend.service import EngineService
from limpet.backend.session_store import SessionStore, StoredSession, StoreError
from limpet.backend.sessions import SessionTable
from tests.aids.hash_runner import hash_engine

WAIT_S = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


def stored(name: str, num_tokens: int = 6) -> StoredSession:
    tokens = token_array(range(num_tokens))
    turns = [Turn('[{"role": "user", "content": "🐚"}]', tokens[2:4], 4), Turn(None, token_array(), num_tokens)]
    return StoredSession(name, History(tokens, turns), last_used=1.5)


def outcome(store: SessionStore) -> StoreError | None:
    """Of the commit that holds everything so far."""
    outcomes: list[StoreError | None] = []
    committed = threading.Event()
    store.on_commit = committed.set
    store.when_stored(outcomes.append)
    while not outcomes:
        assert committed.wait(WAIT_S)
        committed.clear()
        store.run_callbacks()
    return outcomes[0]


def names(path: Path) -> list[str]:
    store = SessionStore(path, "model")
    loaded = [session.id for session in store.load()]
    store.close()
    return loaded


@contextmanager
def no_room_to_write(num_bytes: int) -> Iterator[None]:
    """Files of this process cannot grow past so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_sessions_come_back_as_they_were_saved(path: Path) -> None:
    store = SessionStore(path, "model")
    for name in ("kept", "changed", "ended"):
        store.save(stored(name))
    assert outcome(store) is None
    store.save(stored("changed", 9))
    store.delete("ended")
    store.close()
    again = SessionStore(path, "model")
    assert again.load() == [stored("kept"), stored("changed", 9)]
    again.close()
    assert path.stat().st_mode & 0o077 == 0, "others may read the conversations"


def test_what_gathers_during_a_commit_goes_into_the_next_one(path: Path) -> None:
    store = SessionStore(path, "model")
    reached, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert go_on.wait(WAIT_S)

    store.on_commit = hold
    store.save(stored("first"))
    assert reached.wait(WAIT_S)
    for number in range(50):
        store.save(stored(f"later {number}"))
    go_on.set()
    assert outcome(store) is None
    assert store.num_commits == 2
    store.close()
    assert len(names(path)) == 51


def test_a_full_disk_is_one_sentence_and_the_next_commit_writes_what_is_missing(path: Path) -> None:
    store = SessionStore(path, "model")
    store.save(stored("before"))
    assert outcome(store) is None
    with no_room_to_write(path.with_name("sessions.db-wal").stat().st_size + 100):
        store.save(stored("meanwhile", 10_000))
        error = outcome(store)
    assert str(error).startswith("The session store cannot be written (")
    assert str(error).count(".") == 1
    assert outcome(store) is None
    store.close()
    assert names(path) == ["before", "meanwhile"]


def other_program(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")


def other_release(path: Path) -> None:
    SessionStore(path, "model").close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")


def other_model(path: Path) -> None:
    SessionStore(path, "another model").close()


def no_database(path: Path) -> None:
    path.write_text("The quick brown fox jumps over the lazy dog. " * 50)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (other_program, "another program"),
        (other_release, "format is 99"),
        (other_model, "another tokenizer"),
        (no_database, "not a database"),
        (Path.mkdir, "directory"),
    ],
)
def test_a_file_that_is_not_ours_is_refused_and_left_alone(
    path: Path, make: Callable[[Path], None], reason: str
) -> None:
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(StoreError, match=f"sessions.db cannot be used: .*{reason}"):
        SessionStore(path, "model")
    assert before is None or path.read_bytes() == before


@pytest.mark.parametrize("change", ["turns = x'c1'", "tokens = x'010203'", "tokens = x''", "last_used = 'x'"])
def test_a_damaged_file_is_one_sentence(path: Path, change: str) -> None:
    store = SessionStore(path, "model")
    store.save(stored("damaged"))
    store.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"UPDATE sessions SET {change}")
        connection.commit()
    again = SessionStore(path, "model")
    with pytest.raises(StoreError, match=r"sessions.db cannot be read \(.*\): it is damaged; move it away"):
        again.load()
    again.close()


def test_a_damaged_page_is_found_at_the_start_wherever_it_is(path: Path) -> None:
    store = SessionStore(path, "model")
    for number in range(40):
        store.save(stored(str(number), 500))
    store.close()
    whole = path.read_bytes()
    for page in range(1, len(whole) // 4096):
        path.write_bytes(whole[: page * 4096] + b"\xff" * 4096 + whole[(page + 1) * 4096 :])
        with pytest.raises(StoreError, match=r"sessions\.db cannot be "), closing(SessionStore(path, "model")) as again:
            again.load()


def test_a_read_only_file_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "sessions.db"
        SessionStore(path, "model").close()
        path.chmod(0o444)
        user = os.geteuid()
        os.seteuid(65534 if user == 0 else user)  # nothing is read-only for root
        try:
            with pytest.raises(StoreError, match="Permission denied"):
                SessionStore(path, "model")
        finally:
            os.seteuid(user)


def test_two_engines_do_not_share_a_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("limpet.backend.session_store._LOCK_PATIENCE_S", 0.1)
    store = SessionStore(path, "model")
    with pytest.raises(StoreError, match="another engine uses it"):
        SessionStore(path, "model")
    store.close()


class Served:
    """An engine service with a store; `replies` is what it sent."""

    def __init__(self, path: Path) -> None:
        self.store = SessionStore(path, "model")
        self.engine = hash_engine(num_blocks=40, session_len=60, prefix_caching=True)
        table = SessionTable(idle_timeout_s=60, max_sessions=9, store=self.store)
        self.replies: list[Message] = []
        self.service = EngineService(self.engine, table, frozenset(), lambda _, message: self.replies.append(message))
        self.connection = Connection(b"1", Hello(front_end="1", pid=0, role="front_end"), None)

    def turn(self, key: int, prompt: list[int], *, start: bool) -> None:
        """A raw turn of the session "s" with three tokens of answer, until its Settle."""
        self.service.handle(self.connection, BeginTurn(key, "s", start, False))
        params = SamplingParams(temperature=0, max_tokens=3)
        self.service.handle(self.connection, Submit(key, "", pack_ids(prompt), params))
        self.step()
        self.service.handle(self.connection, Settle(key, 3))

    def step(self) -> None:
        while self.engine.has_work:
            self.service.deliver(self.engine.step())

    def close(self) -> None:
        self.store.close()
        self.engine.close()


def test_the_end_of_a_turn_waits_for_its_commit_and_steps_do_not(path: Path) -> None:
    served = Served(path)
    reached, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert go_on.wait(WAIT_S)

    served.store.on_commit = hold
    served.store.save(stored("something else"))
    assert reached.wait(WAIT_S)
    served.turn(1, [1, 2], start=True)
    served.service.handle(served.connection, Submit(2, "", pack_ids([7]), SamplingParams(max_tokens=5)))
    served.step()
    kinds = [type(reply) for reply in served.replies]
    assert kinds.count(Outputs) >= 8
    assert Settled not in kinds
    go_on.set()
    assert outcome(served.store) is None
    assert served.replies[-1] == Settled(1, 5)
    served.close()


def test_a_turn_that_cannot_be_stored_fails_and_goes_on_from_memory(path: Path) -> None:
    served = Served(path)
    with no_room_to_write(path.with_name("sessions.db-wal").stat().st_size):
        served.turn(1, [1, 2], start=True)
        assert outcome(served.store) is not None
    failed = served.replies[-1]
    assert isinstance(failed, Failed)
    assert (failed.key, failed.code) == (1, "UNAVAILABLE")
    assert "kept in memory" in failed.message
    history = list(served.service.sessions.sessions["s"].history.tokens)
    assert len(history) == 5
    served.turn(2, [*history, 4], start=False)
    assert outcome(served.store) is None
    assert served.replies[-1] == Settled(2, 9)
    served.close()
    again = SessionStore(path, "model")
    assert [len(session.history.tokens) for session in again.load()] == [9]
    again.close()
