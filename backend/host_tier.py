"""The second tier of the cache: which block of host memory holds which content, and who is given up next. No torch.

Contents are the block pool's names for keys and values. A content may be on the device, here, or on both; what is only
here is loaded into a block of the device before it is used.
"""

from collections import OrderedDict


class HostTier:
    """`num_blocks` blocks of host memory, numbered from 0."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._blocks: OrderedDict[bytes, int] = OrderedDict()  # by content; the first is given up next
        self._pinned: dict[bytes, int] = {}
        self.num_evicted = 0  # contents given up for others, since start

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def find(self, content: bytes) -> int | None:
        block = self._blocks.get(content)
        return self._pinned.get(content) if block is None else block

    def store(self, content: bytes) -> int | None:
        """A block for a content that is not here yet, in need the least recently used one; None: all are pinned."""
        if self._free:
            block = self._free.pop()
        elif self._blocks:
            _, block = self._blocks.popitem(last=False)
            self.num_evicted += 1
        else:
            return None
        self._blocks[content] = block
        return block

    def pin(self, content: bytes) -> int:
        """The block of a content that is about to be loaded: it stays until `unpin_all`."""
        if content not in self._pinned:
            self._pinned[content] = self._blocks.pop(content)
        return self._pinned[content]

    def unpin_all(self) -> None:
        """What was pinned is the most recently used."""
        self._blocks.update(self._pinned)
        self._pinned.clear()

    def demote(self, content: bytes) -> None:
        """The content, if it is here, is given up next."""
        if content in self._blocks:
            self._blocks.move_to_end(content, last=False)

    def forget(self, content: bytes) -> None:
        """The content, if it is here, is nobody's any more."""
        block = self._blocks.pop(content, None)
        if block is not None:
            self._free.append(block)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is free or holds one content, and nothing is pinned."""
        assert not self._pinned, "host blocks are still pinned"
        assert sorted([*self._free, *self._blocks.values()]) == list(range(self.num_blocks)), "host blocks are lost"
