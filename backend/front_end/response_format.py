"""What form an answer must have, in the spellings of OpenAI and LMDeploy, vLLM and TensorRT-LLM."""

import json
from collections.abc import Mapping
from typing import Any

from limpet.backend.front_end.errors import RequestError
from limpet.backend.front_end.json_schema import check_schema
from limpet.backend.front_end.option_values import as_json, refusal
from limpet.backend.sampling_params import Guide

_MAX_CHARS = 100_000
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_TYPES = ("text", "json_object", "json_schema", "regex", "choice", "grammar")
_VLLM_FORMS = ("json", "json_object", "regex", "choice", "grammar")
_TENSORRT_LLM_FORMS = {"json_schema": "json_schema", "regex": "regex", "ebnf_grammar": "grammar"}


def response_format(name: str, value: Any) -> Guide | None:
    """{"type": TYPE, TYPE: what it must be}; None where any text will do."""
    form = as_json(value)
    if not isinstance(form, Mapping) or form.get("type") not in _TYPES:
        raise refusal(name, value, f'{{"type": one of {", ".join(_TYPES)}, …}}')
    kind = form["type"]
    if kind == "text":
        return None
    if kind == "json_object":
        return _guide("json_schema", _ANY_OBJECT)
    if kind not in form:
        raise RequestError(f"{name} of type {kind} needs the key {kind}.")
    given = form[kind]
    if kind == "json_schema":
        if not isinstance(given, Mapping) or "schema" not in given:
            raise RequestError(f'{name} of type json_schema needs {{"json_schema": {{"schema": …}}}}.')
        given = given["schema"]
    return _guide(kind, given)


def structured_outputs(name: str, value: Any) -> Guide | None:
    """vLLM's object with one of json, json_object, regex, choice and grammar; None where it is empty."""
    form = as_json(value)
    if not isinstance(form, Mapping):
        raise refusal(name, value, f"an object with one of {', '.join(_VLLM_FORMS)}")
    given = {key: entry for key, entry in form.items() if entry is not None and entry is not False}
    if len(given) > 1 or not given.keys() <= set(_VLLM_FORMS):
        raise refusal(name, value, f"one of {', '.join(_VLLM_FORMS)}")
    for kind, entry in given.items():
        if kind == "json_object":
            return _guide("json_schema", _ANY_OBJECT)
        return _guide("json_schema" if kind == "json" else kind, entry)
    return None


def guided_decoding(kind: str | None, source: str | None) -> Guide | None:
    """TensorRT-LLM's guided_decoding_guide_type and guided_decoding_guide."""
    if kind in (None, ""):
        if source:
            raise RequestError("guided_decoding_guide needs a guided_decoding_guide_type.")
        return None
    if kind == "json":
        return _guide("json_schema", _ANY_OBJECT)
    if kind not in _TENSORRT_LLM_FORMS:
        raise refusal("guided_decoding_guide_type", kind, f"json, {', '.join(_TENSORRT_LLM_FORMS)}")
    return _guide(_TENSORRT_LLM_FORMS[kind], source or "")


def _guide(kind: str, given: Any) -> Guide:
    match kind:
        case "json_schema":
            schema = _load_schema(given)
            check_schema(schema)
            guide = Guide("json_schema", json.dumps(schema, ensure_ascii=False))
        case "choice":
            guide = Guide("grammar", _choice_grammar(as_json(given)))
        case "regex" | "grammar":
            if not isinstance(given, str) or not given:
                raise refusal(kind, given, "a string that is not empty")
            guide = Guide("regex" if kind == "regex" else "grammar", given)
    if len(guide.source) > _MAX_CHARS:
        raise RequestError(f"The {kind} has {len(guide.source)} characters; allowed: {_MAX_CHARS}.")
    try:
        guide.source.encode()
    except UnicodeEncodeError:
        raise RequestError(f"The {kind} has an escape that is only half of a character.") from None
    return guide


def _load_schema(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The JSON schema is no valid JSON: {error}.") from None


def _choice_grammar(choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise refusal("choice", choices, "a list of strings that are not empty")
    literals = (json.dumps(each, ensure_ascii=False) for each in choices)  # escapes are those of the grammar too
    return f"root ::= {' | '.join(literals)}"
