"""Calls of tools in an answer's text, in the two forms that the built-in templates and most others ask for.

Hermes and Qwen (chatml): anywhere in the text, any number of

    <tool_call>
    {"name": "lookup", "arguments": {"key": 1}}
    </tool_call>

Llama 3: the whole answer is one object, or several with semicolons between them,

    {"name": "lookup", "parameters": {"key": 1}}
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from limpet.client.wire import new_id

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")  # what an escape may leave, and no UTF-8 can say


@dataclass(frozen=True)
class Call:
    """A call of a known tool; `arguments` is a JSON object's text."""

    name: str
    arguments: str

    def body(self, index: int | None = None) -> dict[str, Any]:
        """OpenAI's object; with `index` as streamed deltas have it."""
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": f"call_{new_id()}", "type": "function", "function": function}
        return call if index is None else {"index": index} | call


class ToolCallParser:
    """Takes an answer's text piece by piece; what may be a call is held back until it is one, or cannot be any more."""

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = tools
        self._held = ""
        self._is_start = True  # nothing but white space has come yet
        self._is_object = False  # the answer began with a brace
        self._is_after_call = False  # nothing but white space has come since a call

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """The text that is certainly none of a call, and the calls that are complete."""
        self._held += text
        if self._is_start and (stripped := self._held.lstrip()):
            self._is_start, self._is_object = False, stripped[0] == "{"
        if self._is_start or self._is_object:
            return "", []
        return self._tagged()

    def finish(self) -> tuple[str, list[Call]]:
        """What is left when the answer has ended."""
        held, self._held = self._held, ""
        start = held.find(_OPEN)
        calls = self._objects(held if self._is_object else held[start + len(_OPEN) :] if start >= 0 else "")
        if not calls:
            return held, []
        return "" if self._is_object else held[:start], calls

    def _tagged(self) -> tuple[str, list[Call]]:
        shown = ""
        calls: list[Call] = []
        self._drop_space()
        while (start := self._held.find(_OPEN)) >= 0:
            end = self._held.find(_CLOSE, start)
            shown += self._held[:start]
            self._held = self._held[start:]
            if end < 0:
                return shown, calls
            inside = self._held[len(_OPEN) : end - start]
            found = self._objects(inside)
            shown += "" if found else _OPEN + inside + _CLOSE
            calls += found
            self._held = self._held[end - start + len(_CLOSE) :]
            self._is_after_call = bool(found)
            self._drop_space()
        num_kept = _overlap(self._held, _OPEN)
        shown += self._held[: len(self._held) - num_kept]
        self._held = self._held[len(self._held) - num_kept :]
        return shown, calls

    def _drop_space(self) -> None:
        """White space behind a call stands between calls, and is no answer."""
        if self._is_after_call:
            self._held = self._held.lstrip()
            self._is_after_call = not self._held

    def _objects(self, text: str) -> list[Call]:
        """The calls that `text` is; none if it is anything else."""
        calls: list[Call] = []
        position, decoder = 0, json.JSONDecoder(parse_constant=_refuse)
        while text[position:].strip(" \n\r\t;"):
            position += len(text[position:]) - len(text[position:].lstrip(" \n\r\t;"))
            try:
                value, position = decoder.raw_decode(text, position)
            except (ValueError, RecursionError):
                return []
            call = self._call(value)
            if call is None:
                return []
            calls.append(call)
        return calls

    def _call(self, value: Any) -> Call | None:
        if not isinstance(value, dict) or value.get("name") not in self._tools:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, str | dict):
            return None
        # Some models write the object as a string.
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return Call(value["name"], _HALF_OF_A_PAIR.sub("\N{REPLACEMENT CHARACTER}", written))


def _refuse(constant: str) -> NoReturn:
    """NaN and infinities are no JSON: what holds one is no call."""
    raise ValueError(constant)


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a beginning of `mark`."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)
