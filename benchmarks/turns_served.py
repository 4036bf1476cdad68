"""Turns of a session on a running server, over gRPC."""

from functools import partial
from types import TracebackType

import msgspec

from limpet.benchmarks.result import Result
from limpet.client import Client
from limpet.client.exchange import Exchange
from limpet.client.stream import Stream
from limpet.client.wire import SessionFields, build_request, new_id


class ServedTurns:
    """Asks the server at `address`; raises LimpetError."""

    def __init__(self, address: str, model: str | None, num_answer_tokens: int) -> None:
        self._client = Client(address, model=model)
        self._model = self._client.model
        self._summary = self._client.status()["models"][self._model]["engine"]
        self._num_answer_tokens = num_answer_tokens
        self.vocab_size: int = self._summary["vocab_size"]

    def in_session(self, prompts: list[list[int]]) -> list[tuple[float, int]]:
        """The turns of one session; (seconds to the first token, cached tokens) of each."""
        session_id = new_id()
        last = len(prompts) - 1
        sessions = [SessionFields(session_id, start=turn == 0, end=turn == last) for turn in range(len(prompts))]
        return [self._ask(prompt, session)[:2] for prompt, session in zip(prompts, sessions, strict=True)]

    def whole(self, prompts: list[list[int]]) -> list[tuple[float, int]]:
        """The same for a client that sends the whole conversation with each turn."""
        history: list[int] = []
        measured = []
        for prompt in prompts:
            history += prompt
            ttft_s, num_cached, answer = self._ask(history, None)
            measured.append((ttft_s, num_cached))
            history += answer
        return measured

    def described(self, base: Result) -> Result:
        dtype, block_size = self._summary["dtype"], self._summary["block_size"]
        return msgspec.structs.replace(base, model=self._model, via="grpc", dtype=dtype, block_size=block_size)

    def __enter__(self) -> "ServedTurns":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def _ask(self, ids: list[int], session: SessionFields | None) -> tuple[float, int, list[int]]:
        """Seconds to the first token, cached tokens, the answer's ids."""
        options: dict[str, object] = {"max_tokens": self._num_answer_tokens, "temperature": 0.0, "ignore_eos": True}
        if session is None:
            options["cache_salt"] = new_id()  # shares no cached prefix with any other request
        build = partial(build_request, self._model, input_ids=ids, stream=True, options=options, session=session)
        with Stream(self._client.connection, Exchange(build), None) as stream:
            answer = stream.read()
        assert answer.ttft_s is not None, "a complete answer has a first chunk"
        return answer.ttft_s, answer.num_cached_tokens, list(answer.output_ids)
