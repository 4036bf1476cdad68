"""What a JSON schema may say of an object's names, so that no name can escape its own rule."""

from collections.abc import Mapping
from typing import Any

from limpet.backend.front_end.errors import RequestError

_OF_NAMES = frozenset({"type", "pattern", "minLength", "maxLength", "format", "enum", "const"})
_OF_OTHERS = ("additionalProperties", "unevaluatedProperties")


def check_names(schema: Mapping[str, Any], place: str) -> None:
    """Raises RequestError where one name could stand under two rules, or one entry count twice."""
    if "patternProperties" in schema:
        if len(schema["patternProperties"]) != 1:
            raise RequestError(f"patternProperties of the JSON schema at {place} is supported with one pattern only.")
        _refuse_beside("patternProperties", schema, place, "properties", "propertyNames", *_OF_OTHERS)
    if "propertyNames" in schema:
        _refuse_beside("propertyNames", schema, place, "properties")
        _check_property_names(schema["propertyNames"], place)
    _check_count(schema, place)


def _refuse_beside(name: str, schema: Mapping[str, Any], place: str, *others: str) -> None:
    for other in others:
        is_empty = other == "properties" and not schema.get(other)
        if schema.get(other, False) is not False and not is_empty:
            raise RequestError(f"{other} beside {name} of the JSON schema at {place} is not supported.")


def _check_property_names(names: Any, place: str) -> None:
    where = f"propertyNames of the JSON schema at {place}"
    if not isinstance(names, Mapping) or not any(keyword in names for keyword in _OF_NAMES):
        raise RequestError(f"{where} is an object with one of {', '.join(sorted(_OF_NAMES))}.")
    unsupported = [name for name in ("$ref", "anyOf", "oneOf", "allOf") if name in names]
    if unsupported:
        raise RequestError(f"{unsupported[0]} in {where} is not supported.")
    values = [names.get("const", ""), *names.get("enum", ())]
    if names.get("type", "string") != "string" or not all(isinstance(value, str) for value in values):
        raise RequestError(f"{where} can only be strings.")


def _check_count(schema: Mapping[str, Any], place: str) -> None:
    """A name that comes twice is one property, and only declared ones are known to come once."""
    others = [schema[name] for name in _OF_OTHERS if name in schema] or [not schema.get("properties")]
    is_open = "patternProperties" in schema or others[0] is not False
    highest = len(schema.get("required", ())) + 1
    if is_open and schema.get("minProperties", 0) > highest:
        where = f"minProperties of the JSON schema at {place}"
        raise RequestError(f"{where} is supported up to {highest}, one more than are required.")
