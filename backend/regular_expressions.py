"""Reads regular expressions: what the dialects agree on; the rest is refused in one sentence.

That is the common part of ECMA 262 (which JSON Schema names), Python and Rust. Where they differ, a class stands for
what it holds in all of them: `.` for no line end, `\\d`, `\\w` and `\\s` for ASCII's. `\\A`, `\\Z` and `\\z` are `^`
and `$`, the ends of the whole text. xgrammar's own reader passes over anchors, look-around and unknown escapes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from limpet.backend.character_sets import (
    CLASSES,
    LAST_CODE_POINT,
    LINE_ENDS,
    SURROGATES,
    WIDEST,
    Ranges,
    complement,
    union,
)

_MAX_DEPTH = 64
_MAX_REPEATS = 10_000
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_HEX = re.compile(r"x(?P<x>[0-9A-Fa-f]{2})|u\{(?P<b>[0-9A-Fa-f]{1,6})\}|u(?P<u>[0-9A-Fa-f]{4})|U(?P<U>[0-9A-Fa-f]{8})")
_LOW_SURROGATE = re.compile(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})")
_COUNT = re.compile(r"\{(\d{1,9})(,(\d{0,9}))?\}")
_GROUP = re.compile(r"\((?:\?(?::|P?<[A-Za-z_]\w*>))?", re.ASCII)


@dataclass(frozen=True)
class Characters:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True)
class Edge:
    """`^` or `$`."""

    sign: str


@dataclass(frozen=True)
class Concatenation:
    """One part after the other."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True)
class Alternation:
    """One of the parts."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True)
class Repetition:
    """The part, `low` to `high` times; None: without end."""

    part: "Node"
    low: int
    high: int | None


Node: TypeAlias = Characters | Edge | Concatenation | Alternation | Repetition


def parse(pattern: str) -> Node:
    """What the pattern says; raises ValueError with one sentence."""
    parser = _Parser(pattern)
    node = parser.alternation(0)
    if parser.rest():
        parser.refuse("a group ends that does not begin")
    return node


class _Parser:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def rest(self) -> str:
        """What begins where the parser stands: the next character, or ""."""
        return self._pattern[self._at : self._at + 1]

    def refuse(self, reason: str) -> NoReturn:
        raise ValueError(f"{reason} (character {self._at + 1})")

    def alternation(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            self.refuse(f"groups are nested deeper than {_MAX_DEPTH}")
        parts = [self._concatenation(depth)]
        while self.rest() == "|":
            self._at += 1
            parts.append(self._concatenation(depth))
        return parts[0] if len(parts) == 1 else Alternation(tuple(parts))

    def _concatenation(self, depth: int) -> Node:
        parts = []
        while self.rest() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom(depth)))
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def _repeated(self, atom: Node) -> Node:
        count = self._count()
        if count is None:
            return atom
        if isinstance(atom, Edge):
            self.refuse(f"{atom.sign} cannot be repeated")
        if self.rest() == "?":  # lazy: the same texts
            self._at += 1
        if self.rest() in ("+", "*", "?", "{"):
            self.refuse("possessive and double quantifiers are not supported")
        return Repetition(atom, *count)

    def _count(self) -> tuple[int, int | None] | None:
        sign = self.rest()
        if sign and sign in "*+?":
            self._at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        if sign != "{":
            return None
        found = _COUNT.match(self._pattern, self._at)
        if not found:
            self.refuse("{ begins a count such as {2}, {2,} or {2,5}; the character is \\{")
        low = int(found[1])
        high = low if not found[2] else int(found[3]) if found[3] else None
        if max(low, high or 0) > _MAX_REPEATS or (high is not None and high < low):
            self.refuse(f"a count is from 0 to {_MAX_REPEATS}, the smaller number first")
        self._at = found.end()
        return low, high

    def _atom(self, depth: int) -> Node:
        sign = self.rest()
        if sign == "(":
            return self._group(depth)
        if sign == "[":
            return Characters(self._set())
        if sign == "\\":
            return self._escape()
        if sign in "*+?{":
            self.refuse(f"{sign} repeats nothing")
        self._at += 1
        if sign in "^$":
            return Edge(sign)
        return Characters(complement(LINE_ENDS) if sign == "." else self._character(sign))

    def _group(self, depth: int) -> Node:
        found = _GROUP.match(self._pattern, self._at)
        assert found
        self._at = found.end()
        if self.rest() == "?":
            self.refuse("look-around, flags, atomic groups and comments are not supported")
        node = self.alternation(depth + 1)
        if self.rest() != ")":
            self.refuse("a group does not end")
        self._at += 1
        return node

    def _escape(self) -> Node:
        letter = self._pattern[self._at + 1 : self._at + 2]
        if letter in ("A", "Z", "z"):
            self._at += 2
            return Edge("^" if letter == "A" else "$")
        if letter in ("b", "B"):
            self.refuse("word boundaries are not supported")
        return Characters(self._escaped(CLASSES))

    def _escaped(self, classes: Mapping[str, Ranges]) -> Ranges:
        """A character or class after a backslash, in a set or not."""
        letter = self._pattern[self._at + 1 : self._at + 2]
        found = _HEX.match(self._pattern, self._at + 1)
        if found:
            return self._code_point(found)
        following = self._pattern[self._at + 2 : self._at + 3]
        if letter == "c" and following.isascii() and following.isalpha():
            self._at += 3
            return self._character(chr(ord(following) % 32))
        if letter == "0" and following.isdigit():
            self.refuse("octal numbers are not supported; write \\x00")
        self._at += 2
        if letter in classes:
            return classes[letter]
        if letter in _CONTROLS:
            return self._character(chr(_CONTROLS[letter]))
        if not letter:
            self.refuse("a backslash stands last")
        if letter.isascii() and letter.isalnum():
            kind = "back references are" if letter.isdigit() or letter == "k" else f"the escape \\{letter} is"
            self.refuse(f"{kind} not supported")
        return self._character(letter)

    def _code_point(self, found: "re.Match[str]") -> Ranges:
        self._at = found.end()
        code = int(found[found.lastgroup or 0], 16)
        low = _LOW_SURROGATE.match(self._pattern, self._at)
        if found["u"] and 0xD800 <= code <= 0xDBFF and low:
            self._at = low.end()
            code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if code > LAST_CODE_POINT:
            self.refuse("there is no character of that number")
        return self._character(chr(code))

    def _character(self, character: str) -> Ranges:
        code = ord(character)
        if SURROGATES[0] <= code <= SURROGATES[1]:
            self.refuse("half of a character is not supported")
        return ((code, code),)

    def _set(self) -> Ranges:
        self._at += 1
        negated = self.rest() == "^"
        self._at += negated
        if self.rest() == "]":
            self.refuse("a set is empty; the character is \\]")
        members: list[Ranges] = []
        while self.rest() != "]":
            members.append(self._members(WIDEST if negated else CLASSES))
        self._at += 1
        ranges = union(*members)
        return complement(ranges) if negated else ranges

    def _members(self, classes: Mapping[str, Ranges]) -> Ranges:
        """A character, a class or a range of a set."""
        first = self._member(classes)
        if self.rest() != "-" or self._pattern[self._at + 1 : self._at + 2] in ("]", ""):
            return first
        self._at += 1
        last = self._member(classes)
        if not (_is_single(first) and _is_single(last)) or first > last:
            self.refuse("a range of a set goes from one character to a later one; the character is \\-")
        return union(((first[0][0], last[0][0]),))

    def _member(self, classes: Mapping[str, Ranges]) -> Ranges:
        sign = self.rest()
        if not sign:
            self.refuse("a set does not end")
        if self._pattern[self._at : self._at + 2] in ("[:", "[.", "[="):
            self.refuse("named classes such as [:alpha:] are not supported")
        if sign != "\\":
            self._at += 1
            return self._character(sign)
        if self._pattern[self._at + 1 : self._at + 2] == "b":
            self._at += 2
            return self._character("\b")
        return self._escaped(classes)


def _is_single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
