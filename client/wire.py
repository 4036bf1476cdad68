"""Triton's KServe messages: a request built from plain values, a response read into a Chunk."""

import json
import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from limpet.client.errors import InvalidRequest, error_from_text
from limpet.client.options import Messages
from limpet.client.results import Chunk

ADMIN_MODEL = "limpet_admin"
_WANTED = ("finish_reason", "output_ids", "num_input_tokens", "num_output_tokens", "num_cached_tokens")
_INT32 = np.iinfo(np.int32)
_MAX_SESSION_ID_BYTES = 128  # Triton's limit


def new_id() -> str:
    """A random 128-bit string: nobody can guess another's session or request."""
    return uuid.uuid4().hex


@dataclass(frozen=True)
class SessionFields:
    """How a request belongs to a session."""

    id: str
    start: bool = False
    tokens: int | None = None  # cut the history to this many tokens first
    rewind: int = 0  # then drop this many turns
    end: bool = False


def build_request(
    model: str,
    *,
    prompt: str | None = None,
    messages: Messages | None = None,
    input_ids: Sequence[int] | None = None,
    stream: bool = False,
    options: Mapping[str, Any] | None = None,
    apply_chat_template: bool | None = None,
    session: SessionFields | None = None,
) -> pb.ModelInferRequest:
    """The protobuf message of one request; raises InvalidRequest for what cannot be sent at all."""
    request = pb.ModelInferRequest(model_name=model, id=new_id())
    if prompt is not None:
        _require("The prompt", prompt, str, "a string (token ids are given as input_ids)")
        _add_string(request, "text_input", prompt)
    if messages is not None:
        _add_string(request, "messages", _json("messages", copied_messages(messages)))
    if input_ids is not None:
        _add_ids(request, input_ids)
    given = {name: value for name, value in (options or {}).items() if value is not None}
    if given:
        _add_string(request, "sampling_parameters", _json("the options", given))
    _add_bool(request, "stream", stream)
    for name in _WANTED:
        _add_bool(request, f"return_{name}", True)
    if apply_chat_template is not None:
        _require("apply_chat_template", apply_chat_template, bool, "True, False or None")
        request.parameters["apply_chat_template"].bool_param = apply_chat_template
    if messages is not None or session is not None:
        request.parameters["return_num_dropped_turns"].bool_param = True
    if session is not None:
        _add_session(request, session)
    return request


def build_admin_request(op: str, arguments: Mapping[str, Any]) -> pb.ModelInferRequest:
    """The message of one operation of limpet_admin; arguments that are None are left out."""
    request = pb.ModelInferRequest(model_name=ADMIN_MODEL)
    given = {name: value for name, value in arguments.items() if value is not None}
    _add_string(request, "request", _json("the operation", {"op": op, **given}))
    return request


def copied_messages(messages: Messages) -> list[dict[str, Any]]:
    """The messages as plain objects; raises InvalidRequest if they are no list of objects."""
    allowed = "a list of objects such as {'role': 'user', 'content': 'Hello'}"
    _require("messages", messages, Sequence, allowed)
    for message in messages:
        _require("messages", message, Mapping, f"{allowed}, each of them")
    return [dict(message) for message in messages]


def read_chunk(response: pb.ModelStreamInferResponse) -> Chunk:
    """The chunk in a response; raises the LimpetError that the response carries."""
    if response.error_message:
        raise error_from_text(response.error_message)
    outputs = _outputs(response.infer_response)
    text = "".join(_strings(outputs.get("text_output", b"")))
    ids = tuple(np.frombuffer(outputs.get("output_ids", b""), "<i4").tolist())
    reason = next(iter(_strings(outputs.get("finish_reason", b""))), "None")
    return Chunk(
        text=text,
        output_ids=ids,
        num_output_tokens=_count(outputs, "num_output_tokens") or 0,
        finish_reason=None if reason == "None" else reason,
        num_input_tokens=_count(outputs, "num_input_tokens") or 0,
        num_cached_tokens=_count(outputs, "num_cached_tokens") or 0,
        session_tokens=_count(outputs, "session_tokens"),
        num_dropped_turns=_count(outputs, "num_dropped_turns") or 0,
        logprobs=_json_list(outputs, "logprobs"),
        prompt_logprobs=_json_list(outputs, "prompt_logprobs"),
    )


def is_final(response: pb.ModelStreamInferResponse) -> bool:
    """Whether this is the request's last response."""
    parameters = response.infer_response.parameters
    return "triton_final_response" in parameters and bool(parameters["triton_final_response"].bool_param)


def read_admin_response(response: pb.ModelInferResponse) -> dict[str, Any]:
    """The JSON object that limpet_admin answered."""
    answer: dict[str, Any] = json.loads(_strings(_outputs(response)["response"])[0])
    return answer


def _require(what: str, value: object, kind: type, allowed: str) -> None:
    if not isinstance(value, kind) or (kind is Sequence and isinstance(value, str)):
        raise InvalidRequest(f"{what} must be {allowed}, not {type(value).__name__}.")


def _add_session(request: pb.ModelInferRequest, session: SessionFields) -> None:
    _require("The session's id", session.id, str, "a string")
    _check_session_id(session.id)
    _add_bool(request, "return_session_tokens", True)
    request.parameters["sequence_id"].string_param = session.id
    request.parameters["sequence_start"].bool_param = session.start
    request.parameters["sequence_end"].bool_param = session.end
    for name, value in (("session_tokens", session.tokens), ("session_rewind", session.rewind or None)):
        if value is not None:
            _require(name, value, int, "a whole number")
            if not _INT32.min <= value <= _INT32.max:
                raise InvalidRequest(f"{name} is {value}; allowed: whole numbers from 0 to {_INT32.max}.")
            request.parameters[name].int64_param = value


def _check_session_id(session_id: str) -> None:
    """To Triton "0" is no session, and an id ends at its first NUL: it would be another session's."""
    try:
        num_bytes = len(session_id.encode("utf-8"))
    except UnicodeEncodeError:
        num_bytes = 0
    if not 0 < num_bytes <= _MAX_SESSION_ID_BYTES or session_id == "0" or "\0" in session_id:
        allowed = f"1 to {_MAX_SESSION_ID_BYTES} bytes of UTF-8, none of them NUL, and not 0"
        raise InvalidRequest(f"The session's id is {ascii(session_id)[:200]}; allowed: {allowed}.")


def _add_string(request: pb.ModelInferRequest, name: str, value: str) -> None:
    try:
        encoded = value.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} holds half of a surrogate pair: only complete characters can be sent.") from None
    request.inputs.add(name=name, datatype="BYTES", shape=[1])
    request.raw_input_contents.append(struct.pack("<I", len(encoded)) + encoded)


def _add_bool(request: pb.ModelInferRequest, name: str, value: bool) -> None:
    request.inputs.add(name=name, datatype="BOOL", shape=[1])
    request.raw_input_contents.append(b"\x01" if value else b"\x00")


def _add_ids(request: pb.ModelInferRequest, ids: Sequence[int]) -> None:
    try:
        array = np.asarray(ids) if len(ids) else np.empty(0, np.int64)  # [num_tokens]
    except (TypeError, ValueError):
        array = np.empty(0, np.object_)
    is_integer = array.dtype.kind in "iu" and array.ndim == 1
    if not is_integer or (array.size and not (_INT32.min <= array.min() and array.max() <= _INT32.max)):
        raise InvalidRequest("input_ids must be a flat list of 32-bit integers.")
    request.inputs.add(name="input_ids", datatype="INT32", shape=[array.size])
    request.raw_input_contents.append(array.astype("<i4").tobytes())


def _json(what: str, value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"Cannot write {what} as JSON: {error}.") from None


def _outputs(response: pb.ModelInferResponse) -> dict[str, bytes]:
    names = (output.name for output in response.outputs)
    return dict(zip(names, response.raw_output_contents, strict=True))


def _strings(raw: bytes) -> list[str]:
    strings, offset = [], 0
    while offset < len(raw):
        (length,) = struct.unpack_from("<I", raw, offset)
        strings.append(raw[offset + 4 : offset + 4 + length].decode("utf-8"))
        offset += 4 + length
    return strings


def _json_list(outputs: Mapping[str, bytes], name: str) -> tuple[Any, ...]:
    return tuple(entry for listed in _strings(outputs.get(name, b"")) for entry in json.loads(listed))


def _count(outputs: Mapping[str, bytes], name: str) -> int | None:
    return int(np.frombuffer(outputs[name], "<u4")[0]) if name in outputs else None
