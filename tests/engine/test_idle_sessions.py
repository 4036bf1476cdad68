"""Idle sessions: little memory, nothing of a step, at most as many as the setting says."""

import tracemalloc

import pytest

from limpet.backend.core import CachedPrefix, RequestError
from limpet.backend.offline import new_sequence
from limpet.backend.sampling_params import SamplingParams
from limpet.backend.sessions import SessionTable

NUM_SESSIONS, NUM_TOKENS, NUM_TURNS = 1000, 500, 4


def add_idle(table: SessionTable, name: str) -> None:
    """A session of four turns, softly referring to blocks of 64 tokens."""
    size = NUM_TOKENS // NUM_TURNS
    for turn in range(NUM_TURNS):
        lease = table.begin(name, start=turn == 0, end=False, truncate_to=None, rewind=0)
        new = [int(name) * 1000 + turn * size + place for place in range(size)]
        sequence = new_sequence(name, [*lease.history.tokens, *new[:60]], SamplingParams(), frozenset())
        lease.accept(sequence, f'[{{"role": "user", "content": "{name:>240}"}}]')
        sequence.tokens += new[60:]
        references = [
            (1000 + block, f"{name:>24}{block:>8}".encode()) for block in range(-(-len(sequence.tokens) // 64))
        ]
        table.settle(lease, size - 60, CachedPrefix(references, len(sequence.tokens) - 1))


def test_an_idle_session_takes_at_most_100_bytes_a_token() -> None:
    table = SessionTable(idle_timeout_s=3600, max_sessions=NUM_SESSIONS)
    add_idle(table, "0")
    tracemalloc.start()
    for number in range(1, NUM_SESSIONS):
        add_idle(table, str(number))
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [len(session.history.tokens) for session in table.sessions.values()] == [NUM_TOKENS] * NUM_SESSIONS
    assert num_bytes <= 100 * NUM_TOKENS * (NUM_SESSIONS - 1)


def test_expiry_looks_at_no_session_behind_the_oldest() -> None:
    table = SessionTable(idle_timeout_s=3600, max_sessions=10)
    for name in ("0", "1", "2"):
        add_idle(table, name)
    table.sessions["0"].last_used -= 7200
    table.sessions["2"] = None  # type: ignore[assignment]  # whoever looks at it fails
    assert [session.id for session in table.expire()] == ["0"]
    assert table.expire() == []


def test_used_sessions_expire_after_those_that_were_idle_longer() -> None:
    table = SessionTable(idle_timeout_s=3600, max_sessions=10)
    for name in ("0", "1"):
        add_idle(table, name)
    table.abandon(table.begin("0", start=False, end=False, truncate_to=None, rewind=0))
    assert list(table.sessions) == ["1", "0"]
    assert table.sessions["1"].last_used < table.sessions["0"].last_used


def test_no_more_sessions_than_allowed_are_begun() -> None:
    table = SessionTable(idle_timeout_s=3600, max_sessions=2)
    add_idle(table, "0")
    add_idle(table, "1")
    with pytest.raises(RequestError, match="limit of 2 sessions"):
        add_idle(table, "2")
    with pytest.raises(RequestError, match="limit of 2 sessions"):
        table.fork("0", "2")
    table.remove(table.find("0"), "it was ended")
    add_idle(table, "2")
