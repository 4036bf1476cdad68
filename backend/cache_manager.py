"""Which cache blocks a sequence uses: reuse, growth, copy on write, and letting go softly. No torch.

With a host tier, a block that is about to be taken from an idle session or a preempted request is copied to host memory
first (`take_offloads`), and loaded from there when its owner comes back (`BlockMoves.loads`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from limpet.backend.block_pool import BlockPool, is_private, private_content
from limpet.backend.core import CachedPrefix, Sequence
from limpet.backend.host_tier import HostTier
from limpet.backend.prefix_hash import extend_chain

_AHEAD_PER_STEP = 16  # blocks offloaded before they are needed; more would crowd the bus in one step

CachedBlock: TypeAlias = tuple[int | None, bytes]  # (block, or None: only in host memory; content)


@dataclass(frozen=True)
class BlockMoves:
    """What must happen to blocks before a sequence's first step, in this order."""

    copies: list[tuple[int, int]]  # (source, destination)
    loads: list[tuple[int, int]]  # (host block, destination)


class CacheManager:
    """Moves blocks between the pool and sequences.

    `enable_prefix_caching` lets a sequence find full blocks that others computed; without it only a sequence's own soft
    references (its session's, or its own from before a preemption) are reused. `num_ahead` is how many of the blocks
    that are taken next should be in host memory already.
    """

    def __init__(
        self, pool: BlockPool, *, enable_prefix_caching: bool, host: HostTier | None = None, num_ahead: int = 0
    ) -> None:
        self.pool = pool
        self.host = host
        self._findable = enable_prefix_caching
        self._num_ahead = num_ahead
        self._offloads: list[tuple[int, int]] = []
        self._loading: dict[int, int] = {}  # host block by block, in the step that is being planned
        self._loaded_tails: list[bytes] = []  # contents that nobody needs once they are loaded
        self._num_saved = 0  # evictions of what host memory has
        self.num_offloaded = 0
        self.num_loaded = 0

    @property
    def num_evicted(self) -> int:
        """Cached blocks given up for others since start, in all tiers."""
        return self.pool.num_evicted - self._num_saved + (self.host.num_evicted if self.host is not None else 0)

    def attach(self, sequence: Sequence, num_reserved: int) -> BlockMoves | None:
        """Give `sequence` blocks for all its tokens, cached ones first, and set `num_computed`.

        Returns None (nothing changed) when the pool cannot spare the blocks and keep `num_reserved` free. At least one
        token is left to compute.
        """
        pool, size = self.pool, self.pool.block_size
        cached, num_cached = self._cached_blocks(sequence)
        on_device = [block for block, _ in cached if block is not None]
        num_new = pool.blocks_for(len(sequence.tokens)) - len(on_device)
        num_spare = pool.num_free - sum(pool.is_free(block) for block in on_device) - num_reserved - num_new
        tail = cached[-1][0] if num_cached % size else None
        must_copy = tail is not None and not pool.is_free(tail)
        if num_spare < must_copy:
            return None
        copies_tail = must_copy or (tail is not None and sequence.cached_prefix.is_shared and num_spare > 0)
        for block in on_device:
            pool.acquire(block)
        loads = self._take(sequence, cached, num_cached, num_new)
        sequence.num_computed = num_cached
        sequence.num_named = num_cached // size
        copies: list[tuple[int, int]] = []
        if tail is not None and copies_tail:
            own = self._replace(sequence, len(cached) - 1)
            if tail in self._loading:  # copies come before loads
                loads.append((self._loading[tail], own))
            else:
                copies.append((tail, own))
        elif tail is not None:
            self._take_over(tail, sequence.cached_prefix.is_shared)
        self._loading.update((block, host_block) for host_block, block in loads)
        return BlockMoves(copies, loads)

    def grow(self, sequence: Sequence) -> list[int] | None:
        """Blocks to append so that one more position fits; None if the pool is empty."""
        if sequence.num_computed < len(sequence.blocks) * self.pool.block_size:
            return []
        if not self.pool.num_free:
            return None
        new = self._allocate(1)
        sequence.blocks += new
        return new

    def name_full_blocks(self, sequence: Sequence) -> None:
        """Give each block that is full of known, computed tokens its hash as content."""
        num_full = min(sequence.num_computed, len(sequence.tokens)) // self.pool.block_size
        self._extend_hashes(sequence, num_full)
        for index in range(sequence.num_named, num_full):
            self.pool.set_content(sequence.blocks[index], sequence.block_hashes[index], findable=self._findable)
        sequence.num_named = max(sequence.num_named, num_full)

    def detach(self, sequence: Sequence) -> None:
        """Release all blocks; what they hold of the sequence's known tokens becomes its `cached_prefix`."""
        self.name_full_blocks(sequence)
        num_tokens = min(len(sequence.tokens), sequence.num_computed)
        kept = sequence.blocks[: self.pool.blocks_for(num_tokens)]
        sequence.cached_prefix = CachedPrefix([(block, self._content_of(block)) for block in kept], num_tokens)
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.num_computed = 0
        sequence.num_named = 0

    def keep(self, prefix: CachedPrefix) -> None:
        """Somebody will come back for it: its blocks go to host memory before they are given up."""
        for block, content in prefix.references:
            self.pool.keep(block, content)

    def drop(self, prefix: CachedPrefix) -> None:
        """Nobody will come back for it: it is free for the next owner, unless others may find it."""
        for block, content in prefix.references:
            is_unfindable = self.pool.holds(block, content) and self.pool.find(content) != block
            if is_unfindable and self.pool.is_free(block):
                self.pool.forget(block)
            if self.host is not None and is_private(content):
                self.host.forget(content)

    def count_blocks(self, prefix: CachedPrefix) -> tuple[int, int]:
        """How many of the prefix's blocks are on the device, and how many only in host memory."""
        found = [each for each in (self._locate(*reference) for reference in prefix.references) if each is not None]
        num_on_host = sum(block is None for block, _ in found)
        return len(found) - num_on_host, num_on_host

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless the blocks' counts equal `held` (one entry per reference)."""
        self.pool.check_integrity(held)
        if self.host is not None:
            self.host.check_integrity()

    # ---- host memory

    def take_offloads(self) -> list[tuple[int, int]]:
        """The (block, host block) copies of the step that was planned, some of them ahead of need."""
        if self.host is None:
            return []
        for block in self.pool.next_free(self._num_ahead):
            if len(self._offloads) >= _AHEAD_PER_STEP:
                break
            self._offload(block)
        self.host.unpin_all()
        self._loading.clear()
        while self._loaded_tails:
            self.host.forget(self._loaded_tails.pop())
        offloads, self._offloads = self._offloads, []
        self.num_offloaded += len(offloads)
        return offloads

    def _allocate(self, count: int) -> list[int]:
        """Blocks that the pool is known to have; what they hold is saved first."""
        if self.host is not None:
            for block in self.pool.next_free(count):
                self._save(block)
        blocks = self.pool.allocate(count)
        assert blocks is not None, "the blocks were counted wrongly"
        return blocks

    def _save(self, block: int) -> None:
        """The block's content is about to be evicted."""
        content = self.pool.content(block)
        if self.host is not None and content is not None:
            self._offload(block)
            self._num_saved += self.host.find(content) is not None

    def _offload(self, block: int) -> None:
        assert self.host is not None
        content = self.pool.content(block)
        if content is None or not self.pool.is_kept(block) or self.host.find(content) is not None:
            return
        host_block = self.host.store(content)
        if host_block is not None:
            self._offloads.append((block, host_block))

    def _take(
        self, sequence: Sequence, cached: list[CachedBlock], num_cached: int, num_new: int
    ) -> list[tuple[int, int]]:
        """Set the sequence's blocks: the cached ones, those to be loaded into new ones, and new ones; the loads."""
        to_load = [(self._pin(content), content) for block, content in cached if block is None]
        new = iter(self._allocate(num_new))
        sequence.blocks = [next(new) if block is None else block for block, _ in cached]
        loaded = [(index, sequence.blocks[index]) for index, (block, _) in enumerate(cached) if block is None]
        for (index, block), (_, content) in zip(loaded, to_load, strict=True):
            if (index + 1) * self.pool.block_size <= num_cached:
                self.pool.set_content(block, content, findable=self._findable)
            elif is_private(content) and not sequence.cached_prefix.is_shared:  # the sequence writes into the block
                self._loaded_tails.append(content)
        sequence.blocks += new
        self.num_loaded += len(loaded)
        return [(host_block, block) for (host_block, _), (_, block) in zip(to_load, loaded, strict=True)]

    def _pin(self, content: bytes) -> int:
        assert self.host is not None
        return self.host.pin(content)

    # ---- what is cached

    def _cached_blocks(self, sequence: Sequence) -> tuple[list[CachedBlock], int]:
        """What holds the start of the sequence's tokens, and how many tokens that covers."""
        if sequence.wants_prompt_logprobs:
            return [], 0
        size = self.pool.block_size
        prefix = sequence.cached_prefix
        limit = len(sequence.tokens) - 1
        usable = min(prefix.num_tokens, limit)
        if len(sequence.block_hashes) < usable // size:
            sequence.block_hashes = [content for _, content in prefix.references[: usable // size]]
        cached: list[CachedBlock] = []
        for reference in prefix.references[: self.pool.blocks_for(usable)]:
            found = self._locate(*reference)
            if found is None:
                break
            cached.append(found)
        num_cached = min(usable, len(cached) * size)
        if self._findable and num_cached % size == 0:
            cached += self._find_blocks(sequence, len(cached), limit // size)
            num_cached = len(cached) * size
        return cached, num_cached

    def _locate(self, block: int, content: bytes) -> CachedBlock | None:
        """Where the content of a soft reference is now."""
        if self.pool.holds(block, content):
            return block, content
        return self._find(content)

    def _find(self, content: bytes) -> CachedBlock | None:
        block = self.pool.find(content)
        if block is not None:
            return block, content
        return (None, content) if self.host is not None and self.host.find(content) is not None else None

    def _find_blocks(self, sequence: Sequence, first: int, end: int) -> list[CachedBlock]:
        found: list[CachedBlock] = []
        for index in range(first, end):
            self._extend_hashes(sequence, index + 1)
            block = self._find(sequence.block_hashes[index])
            if block is None:
                break
            found.append(block)
        return found

    def _extend_hashes(self, sequence: Sequence, count: int) -> None:
        hashes, size = sequence.block_hashes, self.pool.block_size
        for index in range(len(hashes), count):
            parent = hashes[-1] if hashes else sequence.chain_root
            hashes.append(extend_chain(parent, sequence.tokens[index * size : (index + 1) * size]))

    def _replace(self, sequence: Sequence, index: int) -> int:
        """Give the sequence a block of its own in place of a shared one; returns it."""
        [own] = self._allocate(1)
        self.pool.release([sequence.blocks[index]])
        sequence.blocks[index] = own
        return own

    def _take_over(self, block: int, is_shared: bool) -> None:
        """Its only holder writes into the block; that is an eviction if others refer to its content or can find it."""
        content = self.pool.content(block)
        if content is not None and (is_shared or self.pool.find(content) == block):
            self._save(block)
            self.pool.evict(block)
            return
        self.pool.forget(block)
        if self.host is not None and content is not None and is_private(content):
            self.host.forget(content)

    def _content_of(self, block: int) -> bytes:
        content = self.pool.content(block)
        if content is None:
            content = private_content()
            self.pool.set_content(block, content, findable=False)
        return content
