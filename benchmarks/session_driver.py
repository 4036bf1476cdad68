"""Sessions of an engine in this process, without front end and service."""

import time

from limpet.backend.core import Sequence
from limpet.backend.engine import Engine
from limpet.backend.offline import new_sequence
from limpet.backend.sampling_params import SamplingParams
from limpet.backend.sessions import SessionTable


class SessionDriver:
    """Takes turns whose answers are kept whole."""

    def __init__(self, engine: Engine, params: SamplingParams) -> None:
        self._engine = engine
        self._params = params
        self._table = SessionTable(idle_timeout_s=3600, max_sessions=1_000_000)

    def ask(self, session_id: str, new: list[int]) -> tuple[float, int]:
        """The session's next turn; (seconds to its first token, cached tokens)."""
        started = time.perf_counter()
        starts = session_id not in self._table.sessions
        lease = self._table.begin(session_id, start=starts, end=False, truncate_to=None, rewind=0)
        sequence = new_sequence(session_id, [*lease.history.tokens, *new], self._params, frozenset())
        sequence.cached_prefix = lease.reusable_prefix(sequence.tokens)
        sequence.is_turn = True
        self._engine.add(sequence)
        lease.accept(sequence, None)
        first = run(self._engine, sequence, started)
        self._table.settle(lease, sequence.num_generated, self._engine.cached(sequence, len(sequence.tokens) - 1))
        return first, sequence.num_cached or 0

    def end(self, session_id: str) -> None:
        session = self._table.find(session_id)
        self._table.remove(session, "it was ended")
        self._engine.cache.drop(session.cached)


def run(engine: Engine, sequence: Sequence, started: float) -> float:
    """Answer to the end; seconds to the first token."""
    while not sequence.num_generated:
        engine.step()
    first = time.perf_counter() - started
    while engine.has_work:
        engine.step()
    return first
