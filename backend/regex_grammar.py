"""Regular expressions in xgrammar's notation, for a text or for what stands between the quotes of a JSON string.

They go into one `Regex(…)` of the grammar: an automaton, which costs the same for each character of a text however many
ways there are to match it. Written are only its plainest constructs: sets of numbered characters, (?:…), | and {m,n}.
"""

from typing import Literal, TypeAlias

from limpet.backend.character_sets import ANY, Ranges, complement, union
from limpet.backend.regular_expressions import Alternation, Characters, Concatenation, Edge, Node, Repetition, parse

Place: TypeAlias = Literal["inside", "bound", "open"]  # an edge of a node: in the text, at its end, or at any distance

_MAX_SIZE = 20_000  # in characters: the compiler needs a second or two
_SET_SIZE = 10  # of a set, whose characters have several bytes
_JSON_ESCAPES = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_BACKSLASH = 92


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
    written = _Writer(as_json=as_json).written(node, ends, ends).replace("\\", "\\\\")
    return f'Regex("{written}")'


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


class _Writer:
    """Writes nodes. An open edge takes any text up to the end of the whole, unless `^` or `$` binds it there."""

    def __init__(self, *, as_json: bool) -> None:
        self._characters = _as_json if as_json else _as_text
        self._padding = f"{self._characters(ANY)}*"

    def written(self, node: Node, left: Place, right: Place) -> str:
        """The expression; raises ValueError where an edge could not be kept."""
        match node:
            case Edge(sign):
                return self._padded("", *self._bound(sign, left, right))
            case Concatenation(parts):
                return self._concatenation(list(parts), left, right)
            case Alternation(parts) if _has_edge(node):
                return f"(?:{'|'.join(self.written(part, left, right) for part in parts)})"
            case Alternation(parts):
                inner = "|".join(self.written(part, "inside", "inside") for part in parts)
                return self._padded(f"(?:{inner})", left, right)
            case Repetition(part, low, high):
                if _has_edge(part):
                    raise ValueError("^ and $ are not supported in what is repeated")
                inner = self.written(part, "inside", "inside")
                return self._padded(f"(?:{inner}){{{low},{'' if high is None else high}}}", left, right)
            case Characters(ranges):
                return self._padded(self._characters(ranges), left, right)

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
        return "".join(self.written(*place) for place in places)

    def _bound(self, sign: str, left: Place, right: Place) -> tuple[Place, Place]:
        if (left if sign == "^" else right) == "inside":
            raise ValueError(f"{sign} is supported at the {'beginning' if sign == '^' else 'end'} only")
        return ("bound", right) if sign == "^" else (left, "bound")

    def _padded(self, expression: str, left: Place, right: Place) -> str:
        before = [self._padding] if left == "open" else []
        after = [self._padding] if right == "open" and (expression or not before) else []
        return "".join([*before, expression, *after])


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


def _as_text(ranges: Ranges) -> str:
    if not ranges:
        raise ValueError("a set holds no character")
    return f"[{''.join(f'{_numbered(low)}-{_numbered(high)}' for low, high in ranges)}]"


def _as_json(ranges: Ranges) -> str:
    """Those characters in JSON's one shortest way."""
    if not ranges:
        raise ValueError("a set holds no character")
    plain, special = _split(ranges)
    letters = [_JSON_ESCAPES[code] for code in special if code in _JSON_ESCAPES]
    options = [_as_text(plain)] if plain else []
    options += [_numbered(_BACKSLASH) + _any_of(letters)] if letters else []
    for first in "01":  # of the two digits of a control character
        last = [f"{code % 16:x}" for code in special if code not in _JSON_ESCAPES and code // 16 == int(first)]
        options += [f"{_numbered(_BACKSLASH)}u00{first}{_any_of(last)}"] if last else []
    return f"(?:{'|'.join(options)})"


def _split(ranges: Ranges) -> tuple[Ranges, list[int]]:
    """What JSON takes as it is, and the code points that it takes escaped."""
    must_escape: Ranges = ((0, 31), (34, 34), (92, 92))
    special = [code for low, high in must_escape for code in range(low, high + 1) if _holds(ranges, code)]
    return complement(union(complement(ranges), must_escape)), special


def _any_of(characters: list[str]) -> str:
    return f"[{''.join(_numbered(ord(each)) for each in characters)}]"


def _numbered(code: int) -> str:
    return f"\\u{{{code:x}}}"


def _holds(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)
