"""One request's life without I/O: what to send, what has come back, what is to be done about an error."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from tritonclient.grpc import service_pb2 as pb

from limpet.client.conversation import Conversation, Turn
from limpet.client.errors import Cancelled, LimpetError
from limpet.client.results import Chunk, Generation
from limpet.client.wire import SessionFields, build_request, is_final, read_chunk

BuildRequest: TypeAlias = Callable[[], pb.ModelInferRequest]


def turn_request(turn: Turn, model: str, *, stream: bool, options: Mapping[str, Any]) -> BuildRequest:
    """Makes the request of a session's turn, as the turn stands when it is called."""
    return lambda: build_request(model, stream=stream, options=options, session=turn.fields, **turn.content())


def end_request(conversation: Conversation, model: str) -> BuildRequest:
    """Makes the request that frees a session."""
    return partial(build_request, model, prompt="", session=SessionFields(conversation.id, end=True))


class Exchange:
    """Shared by the blocking and the asyncio stream; `build` makes the request, again for a replay."""

    def __init__(self, build: BuildRequest, turn: Turn | None = None) -> None:
        self._build = build
        self._turn = turn
        self.request = build()
        if turn is not None:
            turn.sent()
        self.complete = False
        self._chunks: list[Chunk] = []
        self._started = self._last = time.perf_counter()
        self._first: float | None = None

    def accept(self, response: pb.ModelStreamInferResponse) -> Chunk:
        """Take a response; raises the LimpetError in it."""
        chunk = read_chunk(response)
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last
        self._chunks.append(chunk)
        if self._turn is not None:
            self._turn.accept(chunk)
        self.complete = is_final(response)
        return chunk

    def failed(self, error: LimpetError) -> bool:
        """Note the end by an error; True if `request`, now a new one, has to be sent again."""
        if self._turn is None or not self._turn.failed(error):
            return False
        self.request = self._build()
        return True

    def closed(self) -> None:
        """Note that the caller wants no more of it."""
        self.failed(Cancelled("The request was cancelled."))

    def result(self) -> Generation:
        """What has arrived so far."""
        last = self._chunks[-1] if self._chunks else Chunk("")
        return Generation(
            text="".join(chunk.text for chunk in self._chunks),
            finish_reason=last.finish_reason,
            output_ids=tuple(token for chunk in self._chunks for token in chunk.output_ids),
            num_input_tokens=last.num_input_tokens,
            num_output_tokens=sum(chunk.num_output_tokens for chunk in self._chunks),
            num_cached_tokens=last.num_cached_tokens,
            session_tokens=last.session_tokens,
            num_dropped_turns=last.num_dropped_turns,
            request_id=self.request.id,
            ttft_s=None if self._first is None else self._first - self._started,
            duration_s=self._last - self._started,
            replayed=self._turn is not None and self._turn.replayed,
            logprobs=tuple(entry for chunk in self._chunks for entry in chunk.logprobs),
            prompt_logprobs=tuple(entry for chunk in self._chunks for entry in chunk.prompt_logprobs),
        )
