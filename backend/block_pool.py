"""Fixed blocks of the key/value cache: reference counts, what each block holds, and who is evicted next. No torch.

Every block may carry a *content*: a name for the keys and values in it. A full block's content is the hash of all
tokens up to its end (`limpet.backend.prefix_hash`) and can be found by it; a partly filled block of an idle session has
a content nobody else can guess. A block that nobody references keeps its content until it is allocated again, so a
*soft reference* is the pair (block, content): still good if `holds` says so. That one mechanism serves idle sessions,
preempted requests and prefix reuse alike.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable

_PRIVATE = b"private"
_private_numbers = itertools.count()


def private_content() -> bytes:
    """A content that equals no other: for blocks whose tokens have no hash."""
    return _PRIVATE + next(_private_numbers).to_bytes(8, "little")


def is_private(content: bytes) -> bool:
    return content.startswith(_PRIVATE) and len(content) == len(_PRIVATE) + 8


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, numbered from 0."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._contents: list[bytes | None] = [None] * num_blocks
        self._kept: set[int] = set()  # blocks with a content that somebody means to come back for
        self._index: dict[bytes, int] = {}  # content -> block, for contents that may be found
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # first = allocated next
        self.num_evicted = 0  # blocks whose content was given up for another owner, since start

    @property
    def num_free(self) -> int:
        """Blocks without a reference, those with a content included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without a reference that still hold a content."""
        return sum(self._contents[block] is not None for block in self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def next_free(self, count: int) -> list[int]:
        """The blocks that `allocate` would take; fewer if there are fewer."""
        return list(itertools.islice(self._free, count))

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` free blocks, oldest content first; None (and nothing taken) if there are fewer."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.evict(block)
            self._references[block] = 1
        return blocks

    def acquire(self, block: int) -> None:
        """Add a reference to a block that `holds` or `find` vouched for."""
        self._references[block] += 1
        self._free.pop(block, None)

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference each; the first ones given are the first to be allocated again."""
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._contents[block] is None:
                    self._free.move_to_end(block, last=False)

    def set_content(self, block: int, content: bytes, *, findable: bool) -> None:
        self.forget(block)
        self._contents[block] = content
        if findable:
            self._index.setdefault(content, block)

    def forget(self, block: int) -> None:
        """The block's keys and values are about to change: soft references to it end."""
        content = self._contents[block]
        if content is not None:
            self._contents[block] = None
            self._kept.discard(block)
            if self._index.get(content) == block:
                del self._index[content]
            if block in self._free:
                self._free.move_to_end(block, last=False)

    def evict(self, block: int) -> None:
        """The block's content is given up for another one."""
        self.num_evicted += self._contents[block] is not None
        self.forget(block)

    def keep(self, block: int, content: bytes) -> None:
        """Somebody means to come back for the content, if the block holds it."""
        if self._contents[block] == content:
            self._kept.add(block)

    def is_kept(self, block: int) -> bool:
        return block in self._kept

    def find(self, content: bytes) -> int | None:
        return self._index.get(content)

    def holds(self, block: int, content: bytes) -> bool:
        return self._contents[block] == content

    def content(self, block: int) -> bytes | None:
        return self._contents[block]

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless the counts equal `held` (one entry per reference)."""
        counts = Counter(held)
        for block, references in enumerate(self._references):
            assert references == counts[block], f"block {block}: {references} references, {counts[block]} holders"
            assert (block in self._free) == (references == 0), f"block {block}: free list disagrees with its count"
        for content, block in self._index.items():
            assert self._contents[block] == content, f"block {block}: found under a content that it does not hold"
