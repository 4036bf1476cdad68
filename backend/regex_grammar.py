"""Regular expressions in xgrammar's notation, for a text or for what stands between the quotes of a JSON string.

Rules, not the `Regex(…)` of xgrammar 0.2.9: its automata are wrong (`(ba*)?c` would be `ac`, too). Stars of one set
stay stars of a set wherever they can: what may begin anew at every character makes each further one dearer.
"""

from typing import Literal, TypeAlias

from limpet.backend.character_sets import ANY, Ranges, complement, union
from limpet.backend.regular_expressions import Alternation, Characters, Concatenation, Edge, Node, Repetition, parse

Place: TypeAlias = Literal["inside", "bound", "open"]  # an edge of a node: in the text, at its end, or at any distance

_MAX_SIZE = 20_000  # in characters: the compiler needs a second or two
_SET_SIZE = 10  # of a set, whose characters have several bytes
_MAX_NESTED_COUNT = 1000
_JSON_ESCAPES = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}


def whole_text_grammar(pattern: str) -> str:
    """A grammar of the texts that match from end to end; raises ValueError with one sentence."""
    return f"root ::= {_expression(pattern, 'bound', as_json=False)}"


def json_string_expression(pattern: str) -> str:
    """A grammar's expression of JSON strings (without quotes) in which the pattern is found; raises ValueError."""
    return _expression(pattern, "open", as_json=True)


def _expression(pattern: str, ends: Place, *, as_json: bool) -> str:
    node = parse(pattern)
    if _size(node) > _MAX_SIZE:
        raise ValueError(f"it is longer than {_MAX_SIZE} characters, where a set counts as {_SET_SIZE}")
    if _nested_count(node, is_nested=False) > _MAX_NESTED_COUNT:
        raise ValueError(f"counts in what is counted multiply to more than {_MAX_NESTED_COUNT}")
    return _Writer(as_json=as_json).written(node, ends, ends)


def _size(node: Node) -> int:
    match node:
        case Concatenation(parts) | Alternation(parts):
            return 1 + sum(_size(part) for part in parts)
        case Repetition(part):
            return _size(part)
        case Characters(ranges):
            return 1 if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else _SET_SIZE
        case _:
            return 1


def _nested_count(node: Node, *, is_nested: bool) -> int:
    """The largest product of counts one inside the other; a count alone is 1."""
    match node:
        case Concatenation(parts) | Alternation(parts):
            return max((_nested_count(part, is_nested=is_nested) for part in parts), default=1)
        case Repetition(Characters(), low, high):
            return max(low, high or 1) if is_nested else 1
        case Repetition(part, low, high):
            inner = _nested_count(part, is_nested=True)
            return inner * max(low, high or 1) if is_nested or inner > 1 else 1
        case _:
            return 1


class _Writer:
    """Writes nodes. An open edge takes any text up to the end of the whole, unless `^` or `$` binds it there."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._padding = self._star(ANY)

    def written(self, node: Node, left: Place, right: Place) -> str:
        """The expression; raises ValueError where an edge could not be kept."""
        match node:
            case Edge(sign):
                return self._padded("", *self._bound(sign, left, right))
            case Concatenation(parts):
                return self._concatenation(list(parts), left, right)
            case Alternation(parts) if _has_edge(node):
                return f"({' | '.join(self.written(part, left, right) for part in parts)})"
            case Alternation(parts):
                inner = " | ".join(self.written(part, "inside", "inside") for part in parts)
                return self._padded(f"({inner})", left, right)
            case Repetition(part) if _has_edge(part):
                raise ValueError("^ and $ are not supported in what is repeated")
            case Repetition(part, low) if "open" in (left, right):  # any further times are part of any text
                if low == 1:
                    return self.written(part, left, right)
                return self._padded(self._repetition(Repetition(part, low, low)) if low else "", left, right)
            case Repetition():
                return self._padded(self._repetition(_flattened(node)), left, right)
            case Characters(ranges):
                return self._padded(self._characters(ranges), left, right)

    def _repetition(self, node: Repetition) -> str:
        part, low, high = node.part, node.low, node.high
        if isinstance(part, Characters) and low <= 1 and high is None:
            return f"{self._characters(part.ranges) + ' ' if low else ''}{self._star(part.ranges)}"
        return f"({self.written(part, 'inside', 'inside')}){{{low},{'' if high is None else high}}}"

    def _concatenation(self, parts: list[Node], left: Place, right: Place) -> str:
        while parts and parts[0] == Edge("^"):
            left, _ = self._bound("^", left, "inside")
            del parts[0]
        while parts and parts[-1] == Edge("$"):
            _, right = self._bound("$", "inside", right)
            del parts[-1]
        if not parts:
            return self._padded("", left, right)
        inside: list[Place] = ["inside"] * (len(parts) - 1)
        places = zip(parts, [left, *inside], [*inside, right], strict=True)
        return " ".join(self.written(*place) for place in places)

    def _bound(self, sign: str, left: Place, right: Place) -> tuple[Place, Place]:
        if (left if sign == "^" else right) == "inside":
            raise ValueError(f"{sign} is supported at the {'beginning' if sign == '^' else 'end'} only")
        return ("bound", right) if sign == "^" else (left, "bound")

    def _padded(self, expression: str, left: Place, right: Place) -> str:
        before = [self._padding] if left == "open" else []
        after = [self._padding] if right == "open" and (expression or not before) else []
        return " ".join([*before, expression or '""', *after])

    def _characters(self, ranges: Ranges) -> str:
        plain, escaped = self._spelled(ranges)
        return f"({plain} | {escaped})" if plain and escaped else plain or escaped

    def _star(self, ranges: Ranges) -> str:
        plain, escaped = self._spelled(ranges)
        stars = f"{plain}*" if plain else '""'
        return f"{stars} ({escaped} {stars})*" if escaped else stars

    def _spelled(self, ranges: Ranges) -> tuple[str, str]:
        """Expressions of the characters that stand as they are, and of those that JSON escapes; "" for none."""
        if not ranges:
            raise ValueError("a set holds no character")
        if not self._as_json:
            return _set(ranges), ""
        plain, special = _split(ranges)
        letters = [_JSON_ESCAPES[code] for code in special if code in _JSON_ESCAPES]
        escaped = [f'"\\\\" {_any_of(letters)}'] if letters else []
        for first in "01":  # of the two digits of a control character
            last = [f"{code % 16:x}" for code in special if code not in _JSON_ESCAPES and code // 16 == int(first)]
            escaped += [f'"\\\\u00{first}" {_any_of(last)}'] if last else []
        return _set(plain) if plain else "", f"({' | '.join(escaped)})" if escaped else ""


def _flattened(node: Repetition) -> Repetition:
    """Without endless repetitions of an endless one, which match in very many ways."""
    part = node.part
    while node.low <= 1 and node.high is None and isinstance(part, Repetition) and part.low <= 1 and part.high is None:
        node = Repetition(part.part, node.low * part.low, None)
        part = node.part
    return node


def _has_edge(node: Node) -> bool:
    match node:
        case Edge():
            return True
        case Concatenation(parts) | Alternation(parts):
            return any(_has_edge(part) for part in parts)
        case Repetition(part):
            return _has_edge(part)
        case _:
            return False


def _split(ranges: Ranges) -> tuple[Ranges, list[int]]:
    """What JSON takes as it is, and the code points that it takes escaped."""
    must_escape: Ranges = ((0, 31), (34, 34), (92, 92))
    special = [code for low, high in must_escape for code in range(low, high + 1) if _holds(ranges, code)]
    return complement(union(complement(ranges), must_escape)), special


def _holds(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def _set(ranges: Ranges) -> str:
    return f"[{''.join(f'{grammar_character(low)}-{grammar_character(high)}' for low, high in ranges)}]"


def _any_of(characters: list[str]) -> str:
    return f"[{''.join(grammar_character(ord(each)) for each in characters)}]"


def grammar_character(code: int) -> str:
    """A code point as the notation has it; its shorter escapes run on into digits that follow."""
    return f"\\U{code:08x}"
