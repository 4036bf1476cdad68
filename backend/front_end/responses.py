"""Responses as Triton wants them; the only place, beside the two models, that speaks pb_utils."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from limpet.backend.front_end.errors import coded_text
from limpet.backend.front_end.request import Outputs
from limpet.backend.link.messages import ErrorCode, FinishReason

_NO_OUTPUTS = Outputs()
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


@dataclass(frozen=True)
class AnswerPart:
    """What one response says; the counts beside `ids` are constant over an answer, but for `session_tokens`.

    `log_probs` are those of `ids`, `logprobs` the same with alternatives, as JSON; `prompt_logprobs` comes once.
    """

    text: str
    ids: Sequence[int] = ()
    finish_reason: FinishReason | None = None
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    session_tokens: int = 0
    num_dropped_turns: int = 0
    log_probs: Sequence[float] = ()
    cumulative_logprob: float = 0.0
    logprobs: str = "[]"
    prompt_logprobs: str | None = None


class Responder:
    """One request's response sender. Two threads on one sender abort the server: only its sender thread calls this."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self.is_finished = False  # the last response was sent

    def is_cancelled(self) -> bool:
        """Whether the client has gone; a round trip to the server of some 50 us."""
        return bool(self._sender.is_cancelled())

    def send(self, part: AnswerPart, outputs: Outputs = _NO_OUTPUTS) -> None:
        """Send a part; the one with a finish reason is the last response."""
        response = pb_utils.InferenceResponse(output_tensors=_tensors(part, outputs))
        if part.finish_reason is None:
            self._sender.send(response)
        else:
            self._send_last(response)

    def fail(self, code: ErrorCode, message: str) -> None:
        """Send an error as the last response."""
        error = pb_utils.TritonError(coded_text(code, message), getattr(pb_utils.TritonError, code))
        self._send_last(pb_utils.InferenceResponse(output_tensors=[], error=error))

    def _send_last(self, response: Any) -> None:
        self._sender.send(response, flags=_FINAL)
        self.is_finished = True


def _tensors(part: AnswerPart, outputs: Outputs) -> list[Any]:
    tensors = [_strings("text_output", part.text)]
    if outputs.finish_reason:
        tensors.append(_strings("finish_reason", part.finish_reason or "None"))
    if outputs.output_ids:
        tensors.append(pb_utils.Tensor("output_ids", np.array(part.ids, dtype=np.int32)))
    tensors += _logprob_tensors(part, outputs)
    counts = {
        "num_input_tokens": part.num_input_tokens,
        "num_output_tokens": len(part.ids),
        "num_cached_tokens": part.num_cached_tokens,
        "session_tokens": part.session_tokens,
        **({"num_dropped_turns": part.num_dropped_turns} if part.num_dropped_turns else {}),
    }
    wanted = [name for name in counts if getattr(outputs, name)]
    return tensors + [pb_utils.Tensor(name, np.array([counts[name]], dtype=np.uint32)) for name in wanted]


def _logprob_tensors(part: AnswerPart, outputs: Outputs) -> list[Any]:
    tensors = []
    cumulative = np.array([part.cumulative_logprob], dtype=np.float32)
    if outputs.logprobs:
        tensors.append(_strings("logprobs", part.logprobs))
    if outputs.prompt_logprobs and part.prompt_logprobs is not None:
        tensors.append(_strings("prompt_logprobs", part.prompt_logprobs))
    if outputs.cumulative_logprob:
        tensors.append(pb_utils.Tensor("cumulative_logprob", cumulative))
    if outputs.log_probs:
        tensors.append(pb_utils.Tensor("cum_log_probs", cumulative))
        each = np.array([part.log_probs], dtype=np.float32)  # [1, num_tokens]
        tensors.append(pb_utils.Tensor("output_log_probs", each))
    return tensors


def _strings(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode()], dtype=np.object_))
