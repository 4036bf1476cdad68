"""Which cache blocks a sequence uses: reuse, growth, copy on write, and letting go softly. No torch."""

from itertools import takewhile

from limpet.backend.block_pool import BlockPool, private_content
from limpet.backend.core import CachedPrefix, Sequence
from limpet.backend.prefix_hash import extend_chain


class CacheManager:
    """Moves blocks between the pool and sequences.

    `enable_prefix_caching` lets a sequence find full blocks that others computed; without it only a sequence's own soft
    references (its session's, or its own from before a preemption) are reused.
    """

    def __init__(self, pool: BlockPool, *, enable_prefix_caching: bool) -> None:
        self.pool = pool
        self._findable = enable_prefix_caching

    def attach(self, sequence: Sequence, num_reserved: int) -> list[tuple[int, int]] | None:
        """Give `sequence` blocks for all its tokens, cached ones first, and set `num_computed`.

        Returns the block copies that must precede its first step, or None (nothing changed) when the pool cannot spare
        the blocks and keep `num_reserved` free. At least one token is left to compute.
        """
        pool, size = self.pool, self.pool.block_size
        blocks, num_cached = self._cached_blocks(sequence)
        num_new = pool.blocks_for(len(sequence.tokens)) - len(blocks)
        num_spare = pool.num_free - sum(pool.is_free(block) for block in blocks) - num_reserved - num_new
        has_tail = num_cached % size != 0
        must_copy = has_tail and not pool.is_free(blocks[-1])
        if num_spare < must_copy:
            return None
        copies_tail = must_copy or (has_tail and sequence.cached_prefix.is_shared and num_spare > 0)
        for block in blocks:
            pool.acquire(block)
        sequence.blocks = blocks
        sequence.num_computed = num_cached
        sequence.num_named = num_cached // size
        copies = self._own_tail(sequence, copies_tail) if has_tail else []
        new = pool.allocate(pool.blocks_for(len(sequence.tokens)) - len(blocks))
        assert new is not None, "attach counted the blocks wrongly"
        sequence.blocks += new
        return copies

    def grow(self, sequence: Sequence) -> list[int] | None:
        """Blocks to append so that one more position fits; None if the pool is empty."""
        if sequence.num_computed < len(sequence.blocks) * self.pool.block_size:
            return []
        new = self.pool.allocate(1)
        if new is not None:
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

    def drop(self, prefix: CachedPrefix) -> None:
        """Nobody will come back for it: it is free for the next owner, unless others may find it."""
        for block, content in prefix.references:
            is_private = self.pool.holds(block, content) and self.pool.find(content) != block
            if is_private and self.pool.is_free(block):
                self.pool.forget(block)

    def count_blocks(self, prefix: CachedPrefix) -> int:
        """How many of the prefix's blocks are still there."""
        return sum(self.pool.holds(*reference) for reference in prefix.references)

    def _cached_blocks(self, sequence: Sequence) -> tuple[list[int], int]:
        """Blocks that hold the start of the sequence's tokens, and how many tokens they cover."""
        if sequence.wants_prompt_logprobs:
            return [], 0
        pool, size = self.pool, self.pool.block_size
        prefix = sequence.cached_prefix
        limit = len(sequence.tokens) - 1
        usable = min(prefix.num_tokens, limit)
        if len(sequence.block_hashes) < usable // size:
            sequence.block_hashes = [content for _, content in prefix.references[: usable // size]]
        candidates = prefix.references[: pool.blocks_for(usable)]
        valid = list(takewhile(lambda reference: pool.holds(*reference), candidates))
        blocks = [block for block, _ in valid]
        num_cached = min(usable, len(blocks) * size)
        if self._findable and num_cached % size == 0:
            blocks += self._find_blocks(sequence, len(blocks), limit // size)
            num_cached = len(blocks) * size
        return blocks, num_cached

    def _find_blocks(self, sequence: Sequence, first: int, end: int) -> list[int]:
        found: list[int] = []
        for index in range(first, end):
            self._extend_hashes(sequence, index + 1)
            block = self.pool.find(sequence.block_hashes[index])
            if block is None:
                break
            found.append(block)
        return found

    def _extend_hashes(self, sequence: Sequence, count: int) -> None:
        hashes, size = sequence.block_hashes, self.pool.block_size
        for index in range(len(hashes), count):
            parent = hashes[-1] if hashes else sequence.chain_root
            hashes.append(extend_chain(parent, sequence.tokens[index * size : (index + 1) * size]))

    def _own_tail(self, sequence: Sequence, copies: bool) -> list[tuple[int, int]]:
        """Make the partly used last block writable: by a copy, or by letting it lose its content."""
        shared = sequence.blocks[-1]
        if not copies:
            self.pool.take_over(shared, is_shared=sequence.cached_prefix.is_shared)
            return []
        own = self.pool.allocate(1)
        assert own is not None, "attach counted the blocks wrongly"
        self.pool.release([shared])
        sequence.blocks[-1] = own[0]
        return [(shared, own[0])]

    def _content_of(self, block: int) -> bytes:
        content = self.pool.content(block)
        if content is None:
            content = private_content()
            self.pool.set_content(block, content, findable=False)
        return content
