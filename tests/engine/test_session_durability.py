"""Sessions outlive the engine: after kill -9 at any point every turn is there whose end was confirmed."""

import contextlib
import random
import sqlite3
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from limpet.backend.sampling_params import SamplingParams
from tests.aids.engine_process import EngineUnderTest, engine_process
from tests.aids.fake_front_end import FakeFrontEnd, Refused, history_ids
from tests.aids.tiny_models import ConvertedTiny, convert_tiny
from tests.aids.transformers_reference import greedy_reference

NUM_KILLS = 50
DEAD_AFTER_S = 2.0
MAX_HISTORY = 400
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ConvertedTiny:
    return convert_tiny(tmp_path_factory.mktemp("durable"), "grouped-query")


@contextmanager
def durable_engine(tiny: ConvertedTiny, path: Path) -> Iterator[EngineUnderTest]:
    parameters = {"cache_bytes": str(4 << 20), "cache_block_seq_len": "16", "device": "cpu", "session_store": str(path)}
    with engine_process(tiny.model_dir, parameters) as running:
        yield running


def history(front_end: FakeFrontEnd, session: str) -> list[int]:
    turn = front_end.begin_turn(session)
    front_end.abandon(turn)
    return history_ids(turn)


def test_a_session_goes_on_after_kill_9_and_a_turn_in_mid_stream_is_undone(tiny: ConvertedTiny, tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    first, second, third = [5, 17, 123], [200], [44, 45]
    with durable_engine(tiny, path) as running, running.connect() as front_end:
        said = first + front_end.ask("ada", first, GREEDY, start=True).ids
        front_end.ask("gone", first, GREEDY, start=True)
        front_end.end_session("gone")
        turn = front_end.begin_turn("ada")
        front_end.submit(said + second, SamplingParams(temperature=0.0, ignore_eos=True), key=turn.key, turn_ends=[])
        front_end.collect(turn.key, at_least=3)
        running.process.kill()
        running.wait_end()
    with durable_engine(tiny, path) as running, running.connect() as front_end:
        assert history(front_end, "ada") == said
        with pytest.raises(Refused, match="NOT_FOUND"):
            front_end.begin_turn("gone")
        answer = front_end.ask("ada", third, GREEDY)
        assert answer.ids == greedy_reference(tiny.reference, said + third, 6).ids
        running.process.terminate()
        assert running.wait_end() == 0
    assert stored_tokens(path) == {"ada": said + third + answer.ids}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_kill_9_at_fifty_random_points_loses_no_confirmed_turn(tiny: ConvertedTiny, tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    talks = [Talk(name, random.Random(name)) for name in ("ada", "bob", "cy", "dee")]
    for number in range(NUM_KILLS):
        with ThreadPoolExecutor(len(talks)) as pool, durable_engine(tiny, path) as running, ExitStack() as stack:
            front_ends = [stack.enter_context(running.connect()) for _ in talks]
            ends = [pool.submit(talk.go_on, front_end) for talk, front_end in zip(talks, front_ends, strict=True)]
            time.sleep(random.Random(number).uniform(0.0, 0.5))  # the point of the kill is what varies
            running.process.kill()
            running.wait_end()
            for end in ends:
                end.result()
        stored = stored_tokens(path)
        for talk in talks:
            talk.check(stored.get(talk.name))
    assert sum(talk.num_turns for talk in talks) > NUM_KILLS
    assert any(talk.num_unconfirmed for talk in talks), "no kill came between the end of a turn and its confirmation"


@dataclass
class Talk:
    """One session's turns. `confirmed` is its history after the last confirmed turn, `unconfirmed` after one more."""

    name: str
    chance: random.Random
    confirmed: list[int] = field(default_factory=list)
    unconfirmed: list[int] | None = None
    num_turns: int = 0
    num_unconfirmed: int = 0

    def go_on(self, front_end: FakeFrontEnd) -> None:
        """Turns until the engine is gone."""
        front_end.timeout_s = DEAD_AFTER_S
        with contextlib.suppress(TimeoutError):
            while True:
                self.take_turn(front_end)

    def take_turn(self, front_end: FakeFrontEnd) -> None:
        starts = not self.confirmed or len(self.confirmed) > MAX_HISTORY
        turn = front_end.begin_turn(self.name, start=starts)
        assert history_ids(turn) == ([] if starts else self.confirmed)
        prompt = [*history_ids(turn), self.chance.randrange(4, 290)]
        params = SamplingParams(temperature=0.0, max_tokens=self.chance.randint(1, 6), ignore_eos=True)
        answer = front_end.collect(front_end.submit(prompt, params, key=turn.key, turn_ends=[]))
        self.unconfirmed = prompt + answer.ids
        front_end.settle(turn.key, len(answer.ids))
        self.confirmed, self.unconfirmed = self.unconfirmed, None
        self.num_turns += 1

    def check(self, stored: list[int] | None) -> None:
        """What is on disk is what was confirmed, or the turn whose end nobody had been told of."""
        assert (stored or []) in (self.confirmed, self.unconfirmed)
        self.num_unconfirmed += self.unconfirmed is not None
        self.confirmed, self.unconfirmed = stored or [], None


def stored_tokens(path: Path) -> dict[str, list[int]]:
    """The histories in a file that is whole."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return {name: list(array("i", ids)) for name, ids in connection.execute("SELECT id, tokens FROM sessions")}
