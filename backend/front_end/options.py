"""Every option of a request in one table: its names, what it allows, and what is accepted without effect.

An option comes as a tensor, a request parameter or a key of the tensor `sampling_parameters`; numbers may be strings.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from limpet.backend.front_end.context_overflow import DROP_OLDEST_TURNS, ERROR
from limpet.backend.front_end.errors import RequestError
from limpet.backend.front_end.option_values import (
    Converter,
    as_json,
    biases,
    boolean,
    choice,
    identifier,
    integer,
    integers,
    objects,
    real,
    shown,
    strings,
    text,
)
from limpet.backend.front_end.response_format import response_format, structured_outputs


@dataclass(frozen=True)
class Option:
    """An option that has an effect."""

    name: str
    convert: Converter
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class NoOp:
    """An option without effect here: accepted at `allowed` values, or any where that is None."""

    name: str
    allowed: tuple[Any, ...] | None
    aliases: tuple[str, ...] = ()

    def check(self, name: str, value: Any) -> None:
        """Raises RequestError for a value that would have to do something."""
        plain = as_json(value)
        if isinstance(plain, list):
            plain = [entry for entry in plain if entry != ""]
        if self.allowed is None or plain in self.allowed:
            return
        allowed = ", ".join(json.dumps(entry) for entry in self.allowed) or "leave it out"
        raise RequestError(f"{name} is {shown(value)}, which is not supported yet; allowed: {allowed}.")


_MAX_INT32 = 2**31 - 1
OPTIONS = (
    Option("stream", boolean),
    Option("max_tokens", integer(1), ("max_completion_tokens",)),
    Option("temperature", real(0)),
    Option("top_k", integer(-1)),
    Option("top_p", real(None, 1)),
    Option("min_p", real(0, 1)),
    Option("seed", integer(0, 2**64 - 1), ("random_seed",)),
    Option("ignore_eos", boolean),
    Option("stop_words", strings(64, 1024), ("stop",)),
    Option("stop_token_ids", integers),
    Option("min_tokens", integer(0, _MAX_INT32), ("min_length",)),
    Option("repetition_penalty", real(0.01, 100)),
    Option("presence_penalty", real(-100, 100)),
    Option("frequency_penalty", real(-100, 100)),
    Option("bad_words", strings(64, 1024)),
    Option("logit_bias", biases(1024, 100)),
    Option("end_id", integer()),
    Option("exclude_input_in_output", boolean),
    Option("apply_chat_template", boolean),
    Option("tools", objects(128)),
    Option("request_priority", integer(-_MAX_INT32, _MAX_INT32)),
    Option("timeout_ms", integer(1, _MAX_INT32)),
    Option("cache_salt", text),
    Option("sequence_id", identifier),
    Option("sequence_start", boolean),
    Option("sequence_end", boolean),
    Option("session_tokens", integer(0, _MAX_INT32)),
    Option("session_rewind", integer(0, _MAX_INT32)),
    Option("context_overflow", choice(ERROR, DROP_OLDEST_TURNS)),
    Option("return_finish_reason", boolean),
    Option("return_num_input_tokens", boolean),
    Option("return_num_output_tokens", boolean),
    Option("return_num_cached_tokens", boolean),
    Option("return_output_ids", boolean),
    Option("return_session_tokens", boolean),
    Option("return_num_dropped_turns", boolean),
    Option("response_format", response_format),
    Option("structured_outputs", structured_outputs, ("guided_decoding",)),
    Option("guided_decoding_guide_type", text),
    Option("guided_decoding_guide", text),
    Option("logprobs", integer(0, 20)),
    Option("prompt_logprobs", integer(0, 20)),
    Option("return_logprobs", boolean),
    Option("return_cumulative_logprob", boolean),
    Option("return_log_probs", boolean),
)
NO_OPS = (
    NoOp("lora_name", ("",)),
    NoOp("length_penalty", None),
    NoOp("pad_id", None),
    NoOp("accumulate_tokens", None),
    NoOp("beam_width", (1,)),
    NoOp("num_return_sequences", (1,)),
    NoOp("n", (1,)),
    NoOp("best_of", (1,)),
    NoOp("use_beam_search", (False,)),
    NoOp("early_stopping", (False,)),
    NoOp("skip_special_tokens", (True,)),
    NoOp("spaces_between_special_tokens", (True,)),
    NoOp("detokenize", (True,)),
    NoOp("include_stop_str_in_output", (False,)),
    NoOp("flat_logprobs", (False,)),
    NoOp("return_context_logits", (False,)),
    NoOp("return_generation_logits", (False,)),
    NoOp("return_perf_metrics", (False,)),
    NoOp("skip_reading_prefix_cache", (False,)),
    NoOp("stream_interval", (1,)),
    NoOp("routed_experts_prompt_start", (0,)),
    NoOp("thinking_token_budget", (-1,)),
    NoOp("extra_args", ({},)),
    NoOp("skip_clone", None),
    NoOp("output_text_buffer_length", None),
)
# Request parameters that are none of ours: Triton's own and what some clients send besides.
IGNORED_PARAMETERS = frozenset({"id", "Streaming", "priority", "timeout", "binary_data_output"})
IGNORED_PREFIX = "triton_"

_BY_NAME: dict[str, Option | NoOp] = {
    name: option for option in (*OPTIONS, *NO_OPS) for name in (option.name, *option.aliases)
}
OPTION_NAMES = frozenset(_BY_NAME)


def resolve(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """The options' values by their first names; a later source outweighs an earlier one, None says nothing.

    Raises RequestError for an unknown name or a value out of range.
    """
    given: dict[str, tuple[str, Any]] = {}
    for source in sources:
        given.update(_by_first_name(source))
    resolved = {}
    for first_name, (name, value) in given.items():
        option = _BY_NAME[first_name]
        if isinstance(option, NoOp):
            option.check(name, value)
        else:
            resolved[first_name] = option.convert(name, value)
    return resolved


def _by_first_name(source: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    given: dict[str, tuple[str, Any]] = {}
    for name, value in source.items():
        if value is None:
            continue
        option = _BY_NAME.get(name)
        if option is None:
            raise RequestError(f"Unknown parameter {name!r}{_suggestion(name)}.")
        other, other_value = given.get(option.name, (name, value))
        if other != name and other_value != value:
            raise RequestError(f"{other} and {name} are the same option with different values; send one of them.")
        given[option.name] = (name, value)
    return given


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name, OPTION_NAMES, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
