"""A runner without a model: it reads back through the block tables what was cached, and its next id is a hash of that.

A wrong block table, a stale block, a missed copy or a position computed twice or never changes the ids; so whatever the
scheduler and the cache do wrong shows, thousands of steps a second.
"""

import zlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from limpet.backend.block_pool import BlockPool
from limpet.backend.cache_manager import CacheManager
from limpet.backend.core import RowWork, SampledStep, StepPlan
from limpet.backend.engine import Engine
from limpet.backend.host_tier import HostTier
from limpet.backend.link.messages import pack_ids
from limpet.backend.scheduler import Scheduler


def next_id(tokens: list[int], vocab_size: int) -> int:
    """The id that follows `tokens`: the reference."""
    return zlib.crc32(pack_ids(tokens)) % vocab_size


@dataclass
class _Row:
    blocks: list[int]
    last_id: int = -1


class HashRunner:
    """Takes the place of `limpet.backend.runner.Runner`; steps are done when they are launched."""

    def __init__(self, *, num_blocks: int, block_size: int, vocab_size: int, num_host_blocks: int = 0) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._memory = [[-1] * block_size for _ in range(num_blocks)]
        self._host = [[-1] * block_size for _ in range(num_host_blocks)]
        self._rows: dict[int, _Row] = {}

    def forward(self, plan: StepPlan) -> StepPlan:
        for block, host_block in plan.offloads:
            self._host[host_block] = list(self._memory[block])
        for source, destination in plan.copies:
            self._memory[destination] = list(self._memory[source])
        for host_block, block in plan.loads:
            self._memory[block] = list(self._host[host_block])
        for start in plan.starts:
            self._rows[start.row] = _Row(list(start.blocks))
        for work in plan.work:
            self._rows[work.row].blocks += work.new_blocks
            self._write(work)
        return plan

    def sample(
        self, plan: StepPlan, masks: None = None, on_ready: Callable[[], None] | None = None
    ) -> "Future[SampledStep]":
        ids = []
        for work in plan.work:
            if work.samples:
                row = self._rows[work.row]
                row.last_id = next_id(self._read(row, work.start + work.num_tokens), self._vocab_size)
                ids.append(row.last_id)
        future: Future[SampledStep] = Future()
        future.set_result(SampledStep(ids))
        if on_ready is not None:
            on_ready()
        return future

    def close(self) -> None:
        pass

    def _write(self, work: RowWork) -> None:
        row = self._rows[work.row]
        ids = [row.last_id] if work.ids is None else work.ids
        assert len(ids) == work.num_tokens, "a row's ids and its number of tokens differ"
        for position, token in enumerate(ids, start=work.start):
            block = row.blocks[position // self._block_size]
            self._memory[block][position % self._block_size] = token

    def _read(self, row: _Row, length: int) -> list[int]:
        size = self._block_size
        return [self._memory[row.blocks[position // size]][position % size] for position in range(length)]


def hash_engine(*, num_blocks: int, session_len: int, prefix_caching: bool, num_host_blocks: int = 0) -> Engine:
    """An engine on a HashRunner: blocks of 4 tokens, 3 rows, 50 ids."""
    host = HostTier(num_host_blocks) if num_host_blocks else None
    cache = CacheManager(BlockPool(num_blocks, 4), enable_prefix_caching=prefix_caching, host=host, num_ahead=5)
    runner = HashRunner(num_blocks=num_blocks, block_size=4, vocab_size=50, num_host_blocks=num_host_blocks)
    scheduler = Scheduler(cache, max_rows=3, max_prefill_tokens=8, max_waiting=100)
    return Engine(runner, scheduler, cache, session_len=session_len, vocab_size=50)
