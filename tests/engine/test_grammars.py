"""Grammars of schemas and regular expressions, against jsonschema and Python's re."""

import itertools
import json
import random
import re
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
import xgrammar

from limpet.backend.front_end.json_schema import check_schema
from limpet.backend.json_grammar import json_grammar
from limpet.backend.regex_grammar import whole_text_grammar

END = 256
ALPHABET = 'ab,"\\/\n\x01 A1é\u2028'
# Sampled is ASCII: single bytes of longer characters seldom make one.
WEIGHTS = {
    **dict.fromkeys(range(128, 256), 1e-9),
    **dict.fromkeys(range(33, 127), 2),
    **dict.fromkeys(b'"}],\\', 60),
    END: 120,
}
NUM_SAMPLES = 12
MAX_BYTES = 600


@cache
def compiler() -> xgrammar.GrammarCompiler:
    vocabulary: list[Any] = [*(bytes([byte]) for byte in range(END)), b""]
    info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, vocab_size=END + 1, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def accepts(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(END)


def sample(grammar: xgrammar.CompiledGrammar, generator: random.Random) -> str:
    """A text of the grammar: ends and closing signs are likelier than others, so that it comes to one."""
    matcher = xgrammar.GrammarMatcher(grammar)
    bits = np.zeros((1, -(-(END + 1) // 32)), dtype=np.int32)
    text = b""
    while len(text) < MAX_BYTES:
        matcher.fill_next_token_bitmask(bits)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[: END + 1])
        weights = [WEIGHTS.get(token, 1) for token in allowed.tolist()]
        [token] = generator.choices(allowed.tolist(), weights)
        assert matcher.accept_token(token)
        if token == END:
            return text.decode()
        text += bytes([token])
    raise AssertionError(f"no end: {text!r}")


@pytest.mark.parametrize(
    "pattern",
    [
        *(r'a"\\', r"a.b", r"[^a]", r"[^a]+b", r"\Aab\Z", r"^a|b$", r"(^a)|b", r"(?:^|,)a", r"(^|a)(b|$)", r"(a$)|^b"),
        *(r"(?P<name>ab)+", r"(?<name>a)b", r"\x41|a", r"\u0041", r"\u{41}", r"[\d\w]", r"[\D]", r"[\W\d]", r"a*?b"),
        *(r"a{2}", r"a{2,}", r"^a{0,1}b$", r"a{0}b", r"a||b", r"(|a)b", "", "^$", "^", "$", r"[\s]a", r"(x*)*", r"\_"),
        *(r"a\$", r"[a-]", r"[\b]", r"\"", "a\nb", r"^^a$$", r'[^"\\]', r"\\.", r"^(a|ab)(,|b,)$", r"[\x00-\x1f]"),
        *(r"^[^\x00-\x1f]*$", r"é", r"^a/?\/$", r"[,-a]", r"\cA", r"^[a-z]+\.?$", "^(a|aa?)$", "^(ba*)?$", "((a*)+)*"),
    ],
)
def test_a_pattern_allows_what_re_finds_and_a_regex_what_it_matches_whole(pattern: str) -> None:
    whole = compiler().compile_grammar(xgrammar.Grammar.from_ebnf(whole_text_grammar(pattern)))
    schema = {"type": "string", "pattern": pattern}
    check_schema(schema)
    found = compiler().compile_grammar(json_grammar(json.dumps(schema)))
    python = re.sub(r"\(\?<(?!P)", "(?P<", re.sub(r"\\u\{(\w+)\}", r"\\x\1", pattern)).replace(r"\cA", r"\x01")
    python = re.sub(r"(?<!\\)\$", r"\\Z", python)  # "$" before a last line end is Python's alone
    for length in range(4):
        for characters in itertools.product(ALPHABET, repeat=length):
            text = "".join(characters)
            quoted = json.dumps(text, ensure_ascii=False)
            expected = re.search(python, text, re.ASCII) is not None
            if "\u2028" not in text:
                assert accepts(whole, text) == (re.fullmatch(python, text, re.ASCII) is not None), text
                assert accepts(found, quoted) == expected, text
            else:  # a line end to some dialects, so not in "."
                assert expected or not accepts(found, quoted)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        *((pattern, r"\^ is supported") for pattern in (r"a\Ab", "a^b", "x*^a")),
        *((pattern, r"\$ is supported") for pattern in ("a$b", "$^", r"a\Zb")),
        *((pattern, "word boundaries") for pattern in (r"\bfoo", r"a\B")),
        *((pattern, "look-around, flags") for pattern in ("(?=a)b", "(?!a)b", "(?<=a)b", "(?i)a", "(?s:.)", "(?>a)")),
        *((pattern, "back references") for pattern in (r"(a)\1", r"(?<n>a)\k<n>", r"\12")),
        *((pattern, "quantifiers") for pattern in ("a++", "a**", "a{2}{3}")),
        *((pattern, "count") for pattern in ("a{,2}", "a{x}", "a{3,2}", "a{99999}")),
        *((pattern, "repeats nothing") for pattern in ("*", "a|*", "{", "(+)")),
        *((pattern, "a set is empty") for pattern in ("[]a]", "[^]a]")),
        *((pattern, "goes from one character") for pattern in ("[z-a]", r"[\w-a]", r"[a-\d]")),
        *((pattern, "escape") for pattern in (r"\Q", r"\e", r"\h", r"\p{L}", r"\U1234")),
        *((pattern, "does not end") for pattern in ("(", "[a", "[a-")),
        ("(^a)*", "in what is repeated"),
        ("[[:alpha:]]", "named classes"),
        ("a)", "does not begin"),
        ("\\", "stands last"),
        (r"\ud800", "half of a character"),
        (r"[^\s\S]", "no character"),
        (r"\012", "octal"),
        ("(" * 70 + ")" * 70, "nested"),
        ("[^a]" * 6000, "longer than"),
        ("((a{1,100}){1,100}){1,100}", "multiply to more"),
    ],
)
def test_what_a_regex_would_say_elsewhere_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        whole_text_grammar(pattern)


def typed(name: str, **keywords: Any) -> dict[str, Any]:
    return {"type": name, **keywords}


OPEN = {"a": {"type": "integer"}, "ab": {"type": "null"}, 'q"\\é\n\x01🦁': {"type": "boolean"}, "": {"type": "null"}}
SCHEMAS = [
    *(
        typed("string", pattern=pattern)
        for pattern in (r'^[a"\\]+$', r"^.{3}$", r"\s", r"^[^a]*$", "^https?://", r"\\")
    ),
    *(typed("string", minLength=low, maxLength=low + 2) for low in (0, 3)),
    typed("string", maxLength=0),
    typed(["string", "null"], pattern='^"x"$'),
    typed("object", properties=OPEN, required=["a"], additionalProperties={"type": "string"}),
    typed("object", properties=OPEN, additionalProperties=True, minProperties=1, maxProperties=3),
    typed("object", properties=OPEN, required=["ab"], unevaluatedProperties={"type": "string"}),
    typed("object", properties={"a": False, "b": {"type": "null"}}, additionalProperties={"type": "integer"}),
    typed("object", properties={"a": False, "b": {"type": "null"}}),
    typed("object", patternProperties={"^[ab]": {"type": "integer"}}, minProperties=1, maxProperties=3),
    typed("object", patternProperties={"^[ab]": {"type": "integer"}}, additionalProperties=False),
    typed("object", propertyNames={"pattern": '^"+$'}, additionalProperties={"type": "integer"}),
    typed("object", propertyNames={"maxLength": 2}, additionalProperties={"type": "null"}),
    typed("object", propertyNames={"enum": ["x", 'y"']}, additionalProperties={"type": "null"}),
    typed("object", propertyNames={"maxLength": 2}, additionalProperties=False),
    typed("object", unevaluatedProperties={"type": "integer"}),
    typed("array", items=False),
    typed("array", prefixItems=[False, {"type": "null"}]),
    typed("array", prefixItems=[True, {"type": "integer"}], items=True, maxItems=1),
    typed("array", prefixItems=[{"type": "null"}, False, {"type": "integer"}]),
    typed("array", prefixItems=[{"type": "null"}], items={"type": "boolean"}, minItems=1, maxItems=3),
    typed("array", items={"$ref": "#/$defs/code"}, minItems=1, maxItems=2)
    | {"$defs": {"code": typed("string", pattern=r"^\d{2}[A-Z]?$")}},
    {"anyOf": [False, {"type": "null"}, typed("string", pattern="^a{1,3}$")]},
    {"enum": ['"\\\n\x01é🦁', {"a": [1, 2.5, None]}, 2**63 - 1, -0.25]},
    {"const": 'a"b'},
    typed("integer", minimum=-12, exclusiveMaximum=1005),
    typed("number", exclusiveMinimum=-1.25, maximum=3.000001),
    typed("number", minimum=0.1, exclusiveMaximum=0.25),
    typed("integer", multipleOf=7),
    *(
        typed("string", format=name)
        for name in ("email", "date-time", "ipv4", "uri", "json-pointer", "uuid", "unknown")
    ),
    *({}, typed("object"), typed("string")),
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:50])
def test_sampled_texts_are_json_that_follows_the_schema(schema: dict[str, Any]) -> None:
    check_schema(schema)
    grammar = compiler().compile_grammar(json_grammar(json.dumps(schema)))
    generator = random.Random(7)
    for _ in range(NUM_SAMPLES):
        text = sample(grammar, generator)
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # no half characters
        jsonschema.Draft202012Validator(schema).validate(value)


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        *(('{"a":1,"abc":"x"}', True), ('{"a":1,"":null}', True), ('{"a":1,"b":"\\u0061"}', True)),
        *(('{"a":1,"ab":"x"}', False), ('{"a":1,"a":"x"}', False), ('{"a":1,"\\u0061":"x"}', False)),
        *(('{"a":1,"\\u0061b":"x"}', False), ('{"\\u0061":1}', False), ('{"a":1,"q\\"\\\\é\\n\\u0001🦁":"x"}', False)),
        *(('{"a":1,"b":"\\ud800"}', False), ('{"a":1,"b":"\\ud83e\\udd81"}', True)),
    ],
)
def test_a_declared_name_has_one_spelling(text: str, is_allowed: bool) -> None:
    schema = typed("object", properties=OPEN, required=["a"], additionalProperties={"type": "string"})
    assert accepts(compiler().compile_grammar(json_grammar(json.dumps(schema))), text) == is_allowed
