"""From a request as Triton hands it over to what the front end works with: checked, resolved, defaults filled in."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from limpet.backend.chat_template import Message, Tool
from limpet.backend.checkpoint import GenerationDefaults
from limpet.backend.front_end.context_overflow import ERROR
from limpet.backend.front_end.errors import RequestError
from limpet.backend.front_end.options import IGNORED_PARAMETERS, IGNORED_PREFIX, resolve
from limpet.backend.front_end.response_format import guided_decoding
from limpet.backend.link.messages import ModelInfo
from limpet.backend.sampling_params import Guide, SamplingParams
from limpet.backend.tokenizer import Tokenizer

RAW_PROMPT_MAX_TOKENS = 16  # where a raw prompt does not say; a chat may use the rest of the context
_MAX_TOKENS = 2**31 - 1
_MAX_SESSION_ID_CHARS = 128  # Triton's own limit
_SEQUENCE_START, _SEQUENCE_END = 1, 2
_MESSAGE_KEYS = {"role": str, "content": str, "tool_calls": list, "tool_call_id": str, "name": str}
_KINDS = {str: "string", list: "list"}


@dataclass(frozen=True)
class RawRequest:
    """A request's plain values; tensors are lists, strings in them still bytes."""

    request_id: str = ""
    tensors: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    correlation_id: int | str = 0
    flags: int = 0


@dataclass(frozen=True)
class Session:
    """Which session a turn belongs to and what happens to it."""

    session_id: str
    start: bool
    end: bool
    truncate_to: int | None
    rewind: int


@dataclass(frozen=True)
class Content:
    """The request's prompt: raw text, raw ids or messages for the template; exactly one is not None.

    `tools` go into the template with the messages.
    """

    text: str | None = None
    ids: list[int] | None = None
    messages: list[Message] | None = None
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True)
class Outputs:
    """Which outputs a response has beside the text; `log_probs` are TensorRT-LLM's two."""

    finish_reason: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    num_cached_tokens: bool = False
    output_ids: bool = False
    session_tokens: bool = False
    num_dropped_turns: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    cumulative_logprob: bool = False
    log_probs: bool = False

    @property
    def any_logprob(self) -> bool:
        """Whether the sampled ids' logprobs are needed."""
        return self.logprobs or self.cumulative_logprob or self.log_probs


@dataclass(frozen=True)
class GenerationRequest:
    """A valid request; `content` None means: end the session, generate nothing."""

    request_id: str
    content: Content | None
    session: Session | None
    params: SamplingParams
    stop_strings: tuple[str, ...]
    stream: bool
    outputs: Outputs
    prepended_text: str = ""  # shown before the answer
    priority: int = 0
    timeout_ms: int | None = None
    cache_salt: str = ""
    context_overflow: str = ERROR


@dataclass(frozen=True)
class RequestReader:
    """Reads one model's requests."""

    tokenizer: Tokenizer
    defaults: GenerationDefaults
    has_template: bool
    default_exclude_input: bool
    streams: bool = field(default=True, kw_only=True)  # False: exactly one response to every request
    default_context_overflow: str = ERROR

    def read(self, raw: RawRequest, info: ModelInfo) -> GenerationRequest:
        """Raises RequestError naming what is wrong and what is allowed."""
        tensors = {name: _tensor_value(name, values) for name, values in raw.tensors.items()}
        content_tensors = {name: tensors.pop(name, None) for name in ("text_input", "messages", "input_ids")}
        sampling = _sampling_object(tensors.pop("sampling_parameters", None))
        options = resolve(tensors, _own_parameters(raw.parameters), sampling)
        session = _session(raw, options)
        content = self._content(content_tensors, session, options, info)
        stream, outputs = options.get("stream", False), _outputs(options)
        if stream and not self.streams:
            raise RequestError("This model gives one response to a request; allowed for stream: false.")
        return GenerationRequest(
            request_id=raw.request_id,
            content=content,
            session=session,
            params=self._params(options, content, outputs, info),
            stop_strings=options.get("stop_words", ()),
            stream=stream,
            outputs=outputs,
            prepended_text="" if stream or session or content is None else self._prepended(content, options),
            priority=options.get("request_priority", 0),
            timeout_ms=options.get("timeout_ms"),
            cache_salt=options.get("cache_salt", ""),
            context_overflow=options.get("context_overflow", self.default_context_overflow),
        )

    def _content(
        self, tensors: Mapping[str, Any], session: Session | None, options: Mapping[str, Any], info: ModelInfo
    ) -> Content | None:
        given = {name: value for name, value in tensors.items() if value not in (None, "", [])}
        if not given and session is not None and session.end:
            return None
        if len(given) != 1:
            what = f"has {' and '.join(given)}" if given else "is empty"
            raise RequestError(f"The prompt {what}; send exactly one of text_input, messages and input_ids.")
        if "input_ids" in given:
            return Content(ids=_checked_ids("input_ids", given["input_ids"], info))
        if "messages" in given:
            messages = checked_messages(_load_json("messages", given["messages"]))
        else:
            self._check_length(given["text_input"], info)
            if not options.get("apply_chat_template", session is not None and self.has_template):
                return Content(text=given["text_input"])
            messages = [{"role": "user", "content": given["text_input"]}]
        self._check_length("".join(message["content"] for message in messages), info)
        return Content(messages=messages, tools=options.get("tools", ()))

    def _check_length(self, text: str, info: ModelInfo) -> None:
        """Refuse before tokenizing what cannot fit, however it is tokenized."""
        longest = self.tokenizer.longest_token_bytes
        if longest is not None and len(text) > longest * info.session_len:
            raise RequestError(
                f"The prompt has {len(text)} characters, more than session_len = {info.session_len} tokens can hold "
                f"(a token of this model stands for at most {longest} bytes)."
            )

    def _params(
        self, options: Mapping[str, Any], content: Content | None, outputs: Outputs, info: ModelInfo
    ) -> SamplingParams:
        is_chat = content is not None and content.messages is not None
        min_tokens = _min_tokens(options)
        max_tokens = options.get("max_tokens", None if is_chat else max(RAW_PROMPT_MAX_TOKENS, min_tokens))
        top_p = options.get("top_p", self.defaults.top_p)
        top_k = options.get("top_k", self.defaults.top_k)
        end_id = options.get("end_id")
        own_ends = [end_id] if end_id is not None and 0 <= end_id < info.vocab_size else []
        return SamplingParams(
            max_tokens=None if max_tokens is None else min(max_tokens, _MAX_TOKENS),
            min_tokens=min_tokens,
            temperature=0.0 if top_p <= 0 else options.get("temperature", self.defaults.temperature),
            top_k=top_k if 0 < top_k < info.vocab_size else 0,
            top_p=top_p if top_p > 0 else 1.0,
            min_p=options.get("min_p", 0.0),
            seed=options["seed"] if "seed" in options else secrets.randbits(63),
            ignore_eos=options.get("ignore_eos", False) or (end_id is not None and not own_ends),
            stop_token_ids=self._stop_token_ids(options, own_ends, info),
            repetition_penalty=options.get("repetition_penalty", self.defaults.repetition_penalty),
            presence_penalty=options.get("presence_penalty", 0.0),
            frequency_penalty=options.get("frequency_penalty", 0.0),
            logit_bias=_logit_bias(options, info),
            bad_words=self._bad_words(options),
            logprobs=options.get("logprobs", 0) if outputs.any_logprob else None,
            prompt_logprobs=options.get("prompt_logprobs"),
            guide=_guide(options),
        )

    def _bad_words(self, options: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
        """Each word's ids as it stands inside a text and after a space."""
        words = [word.lstrip(" ") or word for word in options.get("bad_words", ())]
        spellings = [tuple(self.tokenizer.encode_segment(before + word)) for word in words for before in ("", " ")]
        return tuple(dict.fromkeys(spelling for spelling in spellings if spelling))

    def _stop_token_ids(self, options: Mapping[str, Any], end_ids: list[int], info: ModelInfo) -> tuple[int, ...]:
        given = _checked_ids("stop_token_ids", options.get("stop_token_ids", ()), info)
        # A stop string that is a special token never shows up in the text.
        special = [self.tokenizer.special_id(stop) for stop in options.get("stop_words", ())]
        return tuple(dict.fromkeys([*given, *end_ids, *(stop for stop in special if stop is not None)]))

    def _prepended(self, content: Content, options: Mapping[str, Any]) -> str:
        excludes = options.get("exclude_input_in_output", self.default_exclude_input)
        return "" if excludes or content.text is None else content.text


def _tensor_value(name: str, values: Sequence[Any]) -> Any:
    """A tensor as its option's value: a list where the contract has one, else its only element."""
    decoded = [_decode(name, value) if isinstance(value, bytes) else value for value in values]
    if name in ("input_ids", "stop_words", "bad_words"):
        return decoded
    if len(decoded) != 1:
        raise RequestError(f"{name} has {len(decoded)} elements; allowed: 1.")
    return decoded[0]


def _decode(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is no valid UTF-8 (at byte {error.start}).") from None


def _own_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in parameters.items()
        if name not in IGNORED_PARAMETERS and not name.startswith(IGNORED_PREFIX)
    }


def _sampling_object(source: str | None) -> Mapping[str, Any]:
    if source is None or not source.strip():
        return {}
    sampling = _load_json("sampling_parameters", source)
    if not isinstance(sampling, dict):
        raise RequestError("sampling_parameters must be a JSON object.")
    return sampling


def _session(raw: RawRequest, options: Mapping[str, Any]) -> Session | None:
    """Triton's own sequence fields, else the request parameters of these names."""
    session_id = str(raw.correlation_id or options.get("sequence_id", ""))
    own = [name for name in options if name.startswith(("sequence_", "session_"))]
    if session_id in ("", "0"):
        if own and own != ["sequence_id"]:
            raise RequestError(f"{', '.join(own)} needs a sequence_id.")
        return None
    if len(session_id) > _MAX_SESSION_ID_CHARS:
        raise RequestError(f"The sequence id has {len(session_id)} characters; allowed: {_MAX_SESSION_ID_CHARS}.")
    start = bool(raw.flags & _SEQUENCE_START) or options.get("sequence_start", False)
    earlier = [name for name in ("session_tokens", "session_rewind") if options.get(name)]
    if start and earlier:
        raise RequestError(f"{' and '.join(earlier)} with sequence_start: a session that begins has no earlier turns.")
    return Session(
        session_id=session_id,
        start=start,
        end=bool(raw.flags & _SEQUENCE_END) or options.get("sequence_end", False),
        truncate_to=options.get("session_tokens"),
        rewind=options.get("session_rewind", 0),
    )


def checked_messages(messages: Any) -> list[Message]:
    """A conversation as the template takes it; raises RequestError."""
    shape = 'a JSON list of {"role": string, "content": string}'
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages must be {shape}, with at least one message.")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys() <= _MESSAGE_KEYS.keys():
            others = ", ".join(key for key in _MESSAGE_KEYS if key not in ("role", "content"))
            raise RequestError(f"Message {number} must have the keys role and content; allowed: {shape}, {others}.")
        for key, value in message.items():
            if not isinstance(value, _MESSAGE_KEYS[key]) or (key == "role" and not value):
                raise RequestError(f"{key} of message {number} must be a {_KINDS[_MESSAGE_KEYS[key]]}.")
    checked: list[Message] = messages
    return checked


def _load_json(name: str, source: str) -> Any:
    try:
        value = json.loads(source)
        json.dumps(value, ensure_ascii=False).encode()  # an escape may be half a surrogate pair
    except UnicodeEncodeError:
        raise RequestError(f"{name} has an escape that is only half of a character.") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is no valid JSON: {error}.") from None
    return value


def _outputs(options: Mapping[str, Any]) -> Outputs:
    """What `return_…` switches on; asking for logprobs alone does too."""
    implied = {f"return_{name}": True for name in ("logprobs", "prompt_logprobs") if name in options}
    wanted = implied | dict(options)
    return Outputs(**{name: wanted.get(f"return_{name}", False) for name in Outputs.__dataclass_fields__})


def _min_tokens(options: Mapping[str, Any]) -> int:
    low, high = options.get("min_tokens", 0), options.get("max_tokens")
    if high is not None and low > high:
        raise RequestError(f"min_tokens is {low}; allowed: up to max_tokens, which is {high}.")
    return int(low)


def _guide(options: Mapping[str, Any]) -> Guide | None:
    given = [
        options.get("response_format"),
        options.get("structured_outputs"),
        guided_decoding(options.get("guided_decoding_guide_type"), options.get("guided_decoding_guide")),
    ]
    guides = [guide for guide in given if guide is not None]
    if len(guides) > 1:
        raise RequestError("response_format is given twice, in two spellings; send one of them.")
    return guides[0] if guides else None


def _logit_bias(options: Mapping[str, Any], info: ModelInfo) -> tuple[tuple[int, float], ...]:
    pairs: tuple[tuple[int, float], ...] = options.get("logit_bias", ())
    _checked_ids("logit_bias", [token for token, _ in pairs], info)
    return pairs


def _checked_ids(name: str, ids: Sequence[int], info: ModelInfo) -> list[int]:
    for token_id in ids:
        if not 0 <= token_id < info.vocab_size:
            raise RequestError(f"{name} has the id {token_id}; allowed: 0 to {info.vocab_size - 1}.")
    return list(ids)
