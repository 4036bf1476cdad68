"""response_format: every spelling of the same form is the same guide; what an answer cannot be held to is refused."""

import json
from typing import Any

import pytest

from limpet.backend.sampling_params import Guide
from tests.front_end.test_request import read, refusal

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "size": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]},
        "kind": {"type": "string", "enum": ["a", "b"]},
        "child": {"$ref": "#/$defs/child", "description": "annotations do no harm"},
    },
    "required": ["name"],
    "$defs": {"child": {"type": "object", "properties": {"next": {"$ref": "#/$defs/child"}}}},
}
IN_ORDER = Guide("json_schema", json.dumps(SCHEMA))
CHOICE = Guide("grammar", 'root ::= "yes" | "say \\"no\\"\\n"')
CHOICES = ["yes", 'say "no"\n']


def guide(sampling: Any = None, parameters: dict[str, Any] | None = None, **tensors: Any) -> Guide | None:
    return read(sampling=sampling, parameters=parameters, **tensors).params.guide


def test_every_spelling_of_a_form_is_understood() -> None:
    openai = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
    assert guide({"response_format": openai}) == IN_ORDER
    assert guide(parameters={"response_format": json.dumps(openai)}) == IN_ORDER
    assert guide({"structured_outputs": {"json": SCHEMA, "regex": None}}) == IN_ORDER
    assert guide({"guided_decoding": json.dumps({"json": json.dumps(SCHEMA)})}) == IN_ORDER
    tensors = {"guided_decoding_guide_type": [b"json_schema"], "guided_decoding_guide": [json.dumps(SCHEMA).encode()]}
    assert guide(**tensors) == IN_ORDER


def test_regex_choice_grammar_and_any_object() -> None:
    assert guide({"response_format": {"type": "regex", "regex": "a+"}}) == Guide("regex", "a+")
    assert guide({"response_format": {"type": "choice", "choice": CHOICES}}) == CHOICE
    assert guide({"structured_outputs": {"choice": CHOICES}}) == CHOICE
    assert guide({"response_format": {"type": "grammar", "grammar": 'root ::= "a"'}}) == Guide(
        "grammar", 'root ::= "a"'
    )
    any_object = Guide("json_schema", '{"type": "object"}')
    assert guide({"response_format": {"type": "json_object"}}) == any_object
    assert guide(parameters={"guided_decoding_guide_type": "json"}) == any_object


def test_text_and_empty_forms_ask_for_nothing() -> None:
    assert guide({"response_format": {"type": "text"}}) is None
    assert guide({"structured_outputs": {}}) is None
    assert guide(guided_decoding_guide_type=[b""], guided_decoding_guide=[b""]) is None


@pytest.mark.parametrize(
    ("form", "word"),
    [
        ("json", "type"),
        ({"type": "xml"}, "grammar"),
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "json_schema", "json_schema": SCHEMA}, "schema"),
        ({"type": "json_schema", "json_schema": {"schema": "{"}}, "valid JSON"),
        ({"type": "json_schema", "json_schema": {"schema": False}}, "cannot be fulfilled"),
        ({"type": "regex", "regex": ""}, "regex"),
        ({"type": "regex", "regex": "a" * 100_001}, "100000"),
        ({"type": "choice", "choice": []}, "choice"),
        ({"type": "choice", "choice": ["a", ""]}, "choice"),
    ],
)
def test_malformed_forms_are_refused(form: Any, word: str) -> None:
    assert word in refusal(sampling={"response_format": form})


def test_two_forms_are_refused() -> None:
    twice = {"response_format": {"type": "regex", "regex": "a"}, "structured_outputs": {"regex": "b"}}
    assert "twice" in refusal(sampling=twice)
    assert "regex" in refusal(sampling={"structured_outputs": {"regex": "b", "choice": ["a"]}})
    assert "guide_type" in refusal(parameters={"guided_decoding_guide": "a"})


def twice_each(depth: int, last: dict[str, Any]) -> dict[str, Any]:
    """Definitions that require the next one two times."""
    both = {"type": "object", "required": ["a", "b"]}
    defs = {
        f"d{number}": {**both, "properties": {key: {"$ref": f"#/$defs/d{number + 1}"} for key in "ab"}}
        for number in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{depth}": last}}


def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {"not": {"type": "null"}}}}, "#/properties/a"),
        ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3, "type": "integer"}]}, "allOf"),
        ({"type": "integer", "anyOf": [{"type": "integer", "minimum": 5}]}, "type beside anyOf"),
        ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, "minimum beside $ref"),
        ({"type": "string", "enum": ["a", 1]}, "type beside enum"),
        ({"type": "integer", "const": True}, "type beside const"),
        ({"minimum": 3}, "needs a type"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "maxLength beside pattern"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"type": "integer", "multipleOf": 3, "minimum": 4}, "multipleOf"),
        ({"type": "object", "required": ["z"], "properties": {"a": {}}}, "'z'"),
        ({"type": "whole"}, "allowed: object"),
        ({"type": "array", "minItems": "3"}, "minItems"),
        ({"type": "object", "required": [{}]}, "list of names"),
        ({"$ref": {}}, "refers to {}"),
        ({"enum": ["a"], "type": [{}]}, "allowed: object"),
        ({"type": "string", "pattern": 3}, "pattern"),
        ({"type": "object", "properties": {"a": 3}}, "#/properties/a"),
        ({"$ref": "other.json"}, "other.json"),
        ({"$ref": "#/$defs/a"}, "nothing at #/$defs/a"),
        (nested(65), "deeper"),
        ({"anyOf": []}, "empty"),
        ({"type": "string", "pattern": "a\\bc"}, "at # cannot be followed: word boundaries"),
        ({"type": "object", "patternProperties": {"^a": {}, "b$": {}}}, "one pattern"),
        ({"type": "object", "patternProperties": {"(": {}}}, "cannot be followed"),
        (
            {"type": "object", "patternProperties": {"^a": {}}, "additionalProperties": {}},
            "additionalProperties beside",
        ),
        ({"type": "object", "patternProperties": {"^a": {}}, "properties": {"b": {}}}, "properties beside"),
        ({"type": "object", "propertyNames": {"maxLength": 3}, "properties": {"b": {}}}, "properties beside"),
        ({"type": "object", "propertyNames": {"enum": ["a", 1]}}, "only be strings"),
        ({"type": "object", "propertyNames": {"anyOf": [{"const": "a"}], "maxLength": 3}}, "anyOf"),
        ({"type": "object", "propertyNames": True}, "an object with one of"),
        ({"type": "object", "minProperties": 2}, "up to 1"),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": {}, "minProperties": 2}, "up to 1"),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "wrong type"),
        ({"type": "array", "minItems": -1}, "allowed: from 0"),
        ({"type": "number", "minimum": 0.12345678}, "six decimals"),
        ({"const": {"a": [2**63]}}, "64 bits"),
    ],
)
def test_schemas_that_would_be_followed_in_part_are_refused(schema: Any, word: str) -> None:
    assert word in refusal(sampling={"structured_outputs": {"json": schema}})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#"}]}}},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        twice_each(28, {"$ref": "#/$defs/d0"}),
        {"type": "array", "items": False, "minItems": 1},
        {"type": "array", "prefixItems": [{}, False], "minItems": 2},
        {"anyOf": [False]},
        {"type": "array", "prefixItems": [{"allOf": [False]}]},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
        {"type": ["null", "object"], "properties": {"a": False}, "required": ["a"]},
        {"type": "string", "minLength": 3, "maxLength": 2},
    ],
)
def test_schemas_that_no_text_can_fulfil_are_refused(schema: Any) -> None:
    assert "cannot be fulfilled" in refusal(sampling={"structured_outputs": {"json": schema}})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 2}]},
        {"type": ["null", "array"], "items": {"$ref": "#"}, "minItems": 2},
        nested(60),
        twice_each(28, {"type": "null"}),
        {"$defs": {"unused": {"not": {}}}, "type": "integer"},
        {"type": "array", "items": False},
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"$ref": "#"}},
        {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2},
    ],
)
def test_recursive_schemas_with_an_end_are_followed(schema: Any) -> None:
    assert guide({"structured_outputs": {"json": schema}}) is not None
