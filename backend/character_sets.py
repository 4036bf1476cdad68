"""Sets of characters as ranges of code points, and the classes that regular expressions have names for."""

from itertools import pairwise
from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # first and last code points, ascending

SURROGATES = (0xD800, 0xDFFF)  # halves of characters
LAST_CODE_POINT = 0x10FFFF


def union(*sets: Ranges) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pair for each in sets for pair in each):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """All characters but these; surrogates are none."""
    ends = [(-1, -1), *union(ranges, (SURROGATES,)), (LAST_CODE_POINT + 1, LAST_CODE_POINT + 1)]
    gaps = ((before[1] + 1, after[0] - 1) for before, after in pairwise(ends))
    return tuple((low, high) for low, high in gaps if low <= high)


ANY = complement(())
LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_DIGITS: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACES: Ranges = ((9, 13), (32, 32))
_ALL_SPACES = union(
    _SPACES,
    ((0x1C, 0x1F), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    ((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
# What each class holds in every dialect, and what it holds in any (a set that begins with ^ leaves that out).
CLASSES: dict[str, Ranges] = {
    **{"d": _DIGITS, "w": _WORD, "s": _SPACES},
    **{"D": complement(_DIGITS), "W": complement(_WORD), "S": complement(_ALL_SPACES)},
}
WIDEST = {**CLASSES, "s": _ALL_SPACES, "S": complement(_SPACES)}
