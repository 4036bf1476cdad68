"""Which JSON schemas an answer can be held to.

The grammar compiler (xgrammar) passes over what it cannot express, and some schemas no finite text fulfils. Both are
refused here, with the place: an answer that comes back follows its schema. Only what the root reaches counts.
"""

import math
from collections.abc import Mapping, Set
from typing import Any

from limpet.backend import schema_tree
from limpet.backend.front_end.errors import RequestError
from limpet.backend.front_end.object_schema import check_names
from limpet.backend.front_end.option_values import shown
from limpet.backend.regex_grammar import json_string_expression

_MAX_DEPTH = 64  # the compiler's time grows faster than the depth
_MAX_MULTIPLE = 1024
_MAX_EXACT = 2**53  # the compiler reads bounds of numbers as floats, and compares six decimals
_MAX_INT64 = 2**63 - 1
_PAIRS = (("minItems", "maxItems"), ("minLength", "maxLength"), ("minProperties", "maxProperties"))
_RANGE = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_LENGTH = frozenset({"minLength", "maxLength"})
_NUMBER = _RANGE | {"multipleOf"}
_BY_TYPE: dict[str, frozenset[str]] = {
    "object": frozenset(
        {
            "properties",
            "required",
            "additionalProperties",
            "patternProperties",
            "propertyNames",
            "minProperties",
            "maxProperties",
            "unevaluatedProperties",
        }
    ),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"}),
    "string": _LENGTH | {"pattern", "format"},
    "integer": _NUMBER,
    "number": _NUMBER,
    "boolean": frozenset(),
    "null": frozenset(),
}
_ASSERTIONS = frozenset({"type"}).union(*_BY_TYPE.values())
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")  # what stands beside them would be passed over
_COUNTS = frozenset(name for pair in _PAIRS for name in pair)
_UNSUPPORTED = (
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
    *("contains", "minContains", "maxContains", "$dynamicRef", "$recursiveRef"),
)
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_SHAPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("properties", "patternProperties"), (dict,)),
    **dict.fromkeys(("required", "prefixItems", "enum", "anyOf", "oneOf", "allOf"), (list,)),
    **dict.fromkeys(_COUNTS, (int,)),
    **dict.fromkeys(_NUMBER, (int, float)),
    **dict.fromkeys(("pattern", "format"), (str,)),
}


def check_schema(schema: Any) -> None:
    """Raises RequestError if an answer cannot be held to the schema, or no answer can fulfil it."""
    checker = _Checker(schema)
    checker.check(schema, "#", 0)
    checker.require_ends()


class _Checker:
    """Walks over one schema document."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._targets: dict[str, Any] = {}  # by the references that were followed
        self._checked: list[tuple[Any, str]] = [(root, "#")] if root is False else []  # with their places

    def check(self, schema: Any, place: str, depth: int) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, Mapping):
            raise RequestError(f"The JSON schema at {place} must be an object.")
        if depth > _MAX_DEPTH:
            raise RequestError(f"The JSON schema is nested deeper than {_MAX_DEPTH} levels.")
        _check_keywords(schema, place)
        self._checked.append((schema, place))
        if "$ref" in schema:
            reference = schema["$ref"]
            if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
                raise RequestError(f"The JSON schema at {place} refers to {shown(reference)}; allowed: # and #/….")
            if reference not in self._targets:
                target = self._targets[reference] = self._target(reference)
                self.check(target, reference, depth + 1)
        for name, child in schema_tree.children(schema):
            is_names = name == "propertyNames" and isinstance(child, Mapping)
            self.check({"type": "string", **child} if is_names else child, f"{place}/{name}", depth + 1)

    def require_ends(self) -> None:
        """Raises RequestError if no finite text fulfils one of the checked schemas."""
        finite: set[str] = set()  # references that are known to have an end; grows as long as others rest on them
        while more := {name for name, target in self._targets.items() if _is_finite(target, finite)} - finite:
            finite |= more
        for schema, place in self._checked:
            if not _is_finite(schema, finite):
                what = "what it requires is ruled out or has no end"
                raise RequestError(f"The JSON schema at {place} cannot be fulfilled: {what}.")

    def _target(self, reference: str) -> Any:
        try:
            return schema_tree.target(self._root, reference)
        except KeyError:
            raise RequestError(f"The JSON schema has nothing at {reference}.") from None


def _is_finite(schema: Any, finite: Set[str]) -> bool:
    """Whether some finite text fulfils the schema, if references but those in `finite` have none."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return schema["$ref"] in finite
    for name in ("anyOf", "oneOf", "allOf"):
        if name in schema:
            return any(_is_finite(each, finite) for each in schema[name])
    needed = {"object": _required(schema), "array": _first_items(schema)}
    types = _types(schema, "") or [""]
    return any(all(_is_finite(each, finite) for each in needed.get(name, ())) for name in types)


def _check_keywords(schema: Mapping[str, Any], place: str) -> None:
    for name in _SHAPES.keys() & schema.keys():
        if not isinstance(schema[name], _SHAPES[name]) or isinstance(schema[name], bool):
            raise RequestError(f"{name} of the JSON schema at {place} is {shown(schema[name])}, of a wrong type.")
    if not all(isinstance(name, str) for name in schema.get("required", ())):
        raise RequestError(f"required of the JSON schema at {place} must be a list of names.")
    unsupported = [name for name in _UNSUPPORTED if name in schema]
    if schema.get("uniqueItems", False) is not False:
        unsupported.append("uniqueItems")
    if unsupported:
        raise RequestError(f"{unsupported[0]} of the JSON schema at {place} is not supported.")
    _check_counts(schema, place)
    for pattern in [schema[name] for name in ("pattern",) if name in schema] + [*schema.get("patternProperties", ())]:
        _check_pattern(pattern, place)
    alone = [name for name in _ALONE if name in schema]
    if alone:
        _check_alone(schema, alone, place)
    else:
        _check_types(schema, place)


def _check_counts(schema: Mapping[str, Any], place: str) -> None:
    for name in sorted(_COUNTS & schema.keys()):
        if schema[name] < 0:
            raise RequestError(f"{name} of the JSON schema at {place} is {schema[name]}; allowed: from 0.")
    for low, high in _PAIRS:
        if schema.get(low, 0) > schema.get(high, math.inf):
            raise RequestError(f"The JSON schema at {place} cannot be fulfilled: {low} is more than {high}.")


def _check_pattern(pattern: str, place: str) -> None:
    try:
        json_string_expression(pattern)
    except ValueError as error:
        raise RequestError(
            f"The pattern {shown(pattern)} of the JSON schema at {place} cannot be followed: {error}."
        ) from None


def _check_alone(schema: Mapping[str, Any], alone: list[str], place: str) -> None:
    if not all(_is_exact(value) for value in (schema.get("enum", ()), schema.get("const"))):
        raise RequestError(f"{alone[0]} of the JSON schema at {place} holds a number beyond 64 bits.")
    beside = [*alone[1:], *sorted(_ASSERTIONS & schema.keys())]
    if alone[0] in ("enum", "const") and beside == ["type"] and _all_of_type(schema, _types(schema, place)):
        return
    if beside:
        raise RequestError(f"{beside[0]} beside {alone[0]} of the JSON schema at {place} is not supported.")
    if alone[0] in ("anyOf", "oneOf", "allOf"):
        if not schema[alone[0]]:
            raise RequestError(f"{alone[0]} of the JSON schema at {place} is empty.")
        if alone[0] == "allOf" and len(schema["allOf"]) > 1:
            raise RequestError(f"allOf of the JSON schema at {place} is supported with one entry only.")


def _all_of_type(schema: Mapping[str, Any], names: list[str]) -> bool:
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    types = tuple(each for name in names for each in _PYTHON_TYPES[name])
    return all(isinstance(each, types) and (not isinstance(each, bool) or "boolean" in names) for each in values)


def _is_exact(value: Any) -> bool:
    """Whether the compiler writes all numbers in a value as they are."""
    match value:
        case dict():
            return all(_is_exact(each) for each in value.values())
        case list():
            return all(_is_exact(each) for each in value)
        case int():
            return -_MAX_INT64 <= value <= _MAX_INT64
        case float():
            return math.isfinite(value)
        case _:
            return True


def _check_types(schema: Mapping[str, Any], place: str) -> None:
    types = _types(schema, place)
    asserted = sorted(_ASSERTIONS & schema.keys())
    if asserted and not types:
        raise RequestError(f"{asserted[0]} of the JSON schema at {place} needs a type beside it.")
    shapes = [name for name in ("format", "pattern") if name in schema] + sorted(_LENGTH & schema.keys())[:1]
    if len(shapes) > 1:
        raise RequestError(f"{shapes[1]} beside {shapes[0]} of the JSON schema at {place} is not supported.")
    _check_multiple(schema, types, place)
    _check_range(schema, types, place)
    check_names(schema, place)
    properties = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if properties.get(name, False) is False]
    if missing:
        what = f"it requires {missing[0]!r}, which its properties lack or rule out"
        raise RequestError(f"The JSON schema at {place} cannot be fulfilled: {what}.")


def _types(schema: Mapping[str, Any], place: str) -> list[str]:
    """The types that the schema names, or that the compiler infers."""
    given = schema.get("type")
    if given is None:
        inferred = {"object": ("properties", "additionalProperties"), "array": ("items", "prefixItems")}
        return [name for name, keywords in inferred.items() if any(keyword in schema for keyword in keywords)]
    types = given if isinstance(given, list) else [given]
    unknown = [name for name in types if not isinstance(name, str) or name not in _BY_TYPE]
    if unknown or not types:
        raise RequestError(f"type of the JSON schema at {place} is {given!r}; allowed: {', '.join(_BY_TYPE)}.")
    return types


def _check_multiple(schema: Mapping[str, Any], types: list[str], place: str) -> None:
    multiple = schema.get("multipleOf")
    if multiple is None or not {"integer", "number"} & set(types):
        return
    is_whole = isinstance(multiple, int) and 0 < multiple <= _MAX_MULTIPLE
    if "number" in types or not is_whole or _RANGE & schema.keys():
        allowed = f"on integers without a range, from 1 to {_MAX_MULTIPLE}"
        raise RequestError(f"multipleOf of the JSON schema at {place} is supported {allowed}.")


def _check_range(schema: Mapping[str, Any], types: list[str], place: str) -> None:
    for name in sorted(_RANGE & schema.keys()) if "number" in types else ():
        bound = schema[name]
        if not abs(bound) <= _MAX_EXACT or round(bound, 6) != bound:
            allowed = f"up to {_MAX_EXACT} with up to six decimals"
            raise RequestError(f"{name} of the JSON schema at {place} is {bound}; allowed: numbers {allowed}.")


def _required(schema: Mapping[str, Any]) -> list[Any]:
    return [schema["properties"][name] for name in schema.get("required", ())]


def _first_items(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas of the items that an array must have."""
    count = schema.get("minItems", 0)
    prefix = schema.get("prefixItems", [])[:count]
    return [*prefix, *([schema["items"]] if count > len(prefix) and "items" in schema else [])]
