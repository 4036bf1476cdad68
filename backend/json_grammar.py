"""A JSON schema's grammar: xgrammar writes it, but for its strings.

xgrammar's own strings with a pattern or a length may hold what JSON forbids (mlc-ai/xgrammar#800), its reader of
regular expressions is not used, and a declared name that is spelled with escapes passes there for another one. So each
such string comes into the schema as a pattern that only names it, and into the grammar as an expression written here.
Names have one spelling each: characters as they are, escapes where JSON demands them.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from limpet.backend import schema_tree
from limpet.backend.regex_grammar import grammar_character, json_string_expression

if TYPE_CHECKING:
    import xgrammar

_MAX_NAME_CHARACTERS = 4000  # that declared names may have together: compiling takes their square, here four seconds
_MAX_WHITESPACE = 20  # between JSON's tokens: small models can go on with it for ever
_ESCAPE = re.compile(r"^basic_escape ::= .*$", re.MULTILINE)
_NAMED = re.compile(r'^(\w+) ::= Regex\("(limpet-\d+)", json_string=true\)$', re.MULTILINE)
# A code point by its number is never half of a character.
_CHARACTERS = r"""
basic_escape ::= ["\\/bfnrt] | "u" limpet_code_point
limpet_character ::= [^\0-\x1f"\\] | "\\" basic_escape
limpet_name_character ::= [^\0-\x1f"\\] | "\\" ["\\bfnrt]
limpet_code_point ::= [0-9A-CEFa-cef] limpet_hex{3} | [Dd] [0-7] limpet_hex{2} | limpet_surrogates
limpet_surrogates ::= [Dd] [89ABab] limpet_hex{2} "\\u" [Dd] [C-Fc-f] limpet_hex{2}
limpet_hex ::= [0-9A-Fa-f]
"""


def json_grammar(source: str) -> "xgrammar.Grammar":
    """The grammar of a schema that was checked; raises ValueError or RuntimeError where there is none."""
    import xgrammar

    schema = json.loads(source)
    strings = _Strings(schema)
    written = xgrammar.Grammar.from_json_schema(json.dumps(strings.named(schema)), max_whitespace_cnt=_MAX_WHITESPACE)
    grammar = _NAMED.sub(lambda found: f"{found[1]} ::= {strings.expressions[found[2]]}", str(written))
    return xgrammar.Grammar.from_ebnf("\n".join([_ESCAPE.sub("", grammar), *strings.rules, _CHARACTERS]))


class _Strings:
    """Gives each constrained string of a document a name."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._seen: set[int] = set()
        self.expressions: dict[str, str] = {}  # by the name that stands in the schema as a pattern
        self.rules: list[str] = []  # what the expressions use

    def named(self, schema: Any) -> Any:
        """The schema, changed in place, and all that it reaches."""
        if isinstance(schema, bool) or id(schema) in self._seen:
            return schema
        self._seen.add(id(schema))
        if "$ref" in schema:
            self.named(schema_tree.target(self._root, schema["$ref"]))
        for _, child in [*schema_tree.children(schema)]:
            self.named(child)
        _drop_what_is_ruled_out(schema)
        self._name_string(schema)
        self._name_properties(schema)
        return schema

    def _name(self, expression: str) -> str:
        name = f"limpet-{len(self.expressions)}"
        self.expressions[name] = expression
        return name

    def _name_string(self, schema: dict[str, Any]) -> None:
        if "pattern" in schema:
            schema["pattern"] = self._name(json_string_expression(schema["pattern"]))
        elif "minLength" in schema or "maxLength" in schema:
            low, high = schema.pop("minLength", 0), schema.pop("maxLength", "")
            schema["pattern"] = self._name(f"limpet_character{{{low},{high}}}")

    def _name_properties(self, schema: dict[str, Any]) -> None:
        """Additional properties become those of a pattern: all names but the declared ones."""
        if "patternProperties" in schema:
            [(pattern, values)] = schema["patternProperties"].items()
            schema["patternProperties"] = {self._name(json_string_expression(pattern)): values}
        declared = schema.get("properties", {})
        if False in declared.values():
            schema["properties"] = {name: each for name, each in declared.items() if each is not False}
        if "unevaluatedProperties" in schema:
            schema.setdefault("additionalProperties", schema.pop("unevaluatedProperties"))
        others = schema.get("additionalProperties", False)
        if declared and others is not False:
            schema["patternProperties"] = {self._name(self._other_names(declared)): others}
            schema["additionalProperties"] = False
        elif schema.get("additionalProperties") is False:
            schema.pop("propertyNames", None)

    def _other_names(self, declared: Iterable[str]) -> str:
        """An expression of all names but those, each in one spelling: a rule for each beginning of one."""
        following: list[dict[str, int]] = [{}]  # what each beginning may go on with, and to which one
        ends = set()
        for name in declared:
            at = 0
            for character in name:
                if character not in following[at]:
                    following[at][character] = len(following)
                    following.append({})
                at = following[at][character]
            ends.add(at)
        if len(following) > _MAX_NAME_CHARACTERS:
            allowed = f"{_MAX_NAME_CHARACTERS} characters of names beside additionalProperties"
            raise ValueError(f"allowed are {allowed}, given are {len(following)}")
        prefix = f"limpet_name_{len(self.expressions)}"
        for at, others in enumerate(following):
            options = [] if at in ends else ['""']
            options += [f"{_quoted(_spelled(character))} {prefix}_{to}" for character, to in others.items()]
            options += [f"{each} limpet_name_character*" for each in _name_characters_but(others)]
            self.rules.append(f"{prefix}_{at} ::= {' | '.join(options)}")
        return f"{prefix}_0"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _spelled(character: str) -> str:
    """As JSON has it between quotes."""
    return _quoted(character)[1:-1]


def _name_characters_but(excluded: Iterable[str]) -> Iterator[str]:
    """Expressions of one character of a name, in its one spelling."""
    spelled = [_spelled(character) for character in excluded]
    plain = "".join(grammar_character(ord(each)) for each in spelled if len(each) == 1)
    yield f'[^\\0-\\x1f"\\\\{plain}]'
    letters = [letter for letter in '"\\bfnrt' if f"\\{letter}" not in spelled]
    if letters:
        yield f'"\\\\" [{"".join(grammar_character(ord(each)) for each in letters)}]'


def _drop_what_is_ruled_out(schema: dict[str, Any]) -> None:
    """Alternatives that are false are none, and an array ends before an item that is, or is one too many."""
    for name in ("anyOf", "oneOf"):
        if name in schema:
            schema[name] = [each for each in schema[name] if each is not False]
    items = schema.pop("prefixItems", [])
    possible = items[: items.index(False)] if False in items else items
    possible = possible[: schema.get("maxItems")]
    if possible:
        schema["prefixItems"] = [{} if each is True else each for each in possible]
    if len(possible) < len(items):
        schema["items"] = False
