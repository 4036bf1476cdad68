"""The schemas inside a JSON schema document, and what its references point to."""

from collections.abc import Iterator, Mapping
from typing import Any

_MAPS = ("properties", "patternProperties")
_SINGLE = ("additionalProperties", "propertyNames", "unevaluatedProperties", "items", "unevaluatedItems")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")


def children(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside one, with their places."""
    for name in _MAPS:
        for key, child in schema.get(name, {}).items():
            yield f"{name}/{key}", child
    for name in _SINGLE:
        if name in schema:
            yield name, schema[name]
    for name in _LISTS:
        for index, child in enumerate(schema.get(name, ())):
            yield f"{name}/{index}", child


def target(root: Any, reference: str) -> Any:
    """What a reference such as #/$defs/a points to; raises KeyError where there is nothing."""
    found = root
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            raise KeyError(reference)
        found = found[name]
    return found
