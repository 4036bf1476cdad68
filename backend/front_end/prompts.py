"""What the worker threads do for a request: check it, and turn its content into the prompt's ids."""

import logging
from dataclasses import dataclass
from functools import partial

import msgspec

from limpet.backend.chat_template import TemplateError
from limpet.backend.front_end.context_overflow import DROP_OLDEST_TURNS, Shortened, fitting_prompt
from limpet.backend.front_end.conversation import Conversation, TurnPrompt
from limpet.backend.front_end.errors import RequestError
from limpet.backend.front_end.request import Content, GenerationRequest, RawRequest, RequestReader
from limpet.backend.link.connection import EngineConnection, EngineUnavailableError
from limpet.backend.link.messages import ModelInfo, Submit, TurnBegun, pack_ids, unpack_ids
from limpet.backend.log import quoted
from limpet.backend.tokenizer import Tokenizer

_logger = logging.getLogger(__name__)
NOTHING_BEFORE = TurnBegun(key=0, history_len=0, head=b"", turns=[])


@dataclass(frozen=True)
class Prompt:
    """Ids ready for the engine; `num_input_tokens` of them are new in this turn, `shortened` is what they say."""

    ids: list[int]
    turn_ends: list[int]
    num_input_tokens: int
    shortened: Shortened

    def submit(self, key: int, request: GenerationRequest, arrived_at: float) -> Submit:
        """The message that starts generating."""
        is_templated = request.content is not None and request.content.messages is not None
        return Submit(
            key=key,
            request_id=request.request_id,
            prompt=pack_ids(self.ids),
            params=request.params,
            messages=msgspec.json.encode(self.shortened.messages).decode() if is_templated else None,
            turn_ends=self.turn_ends,
            num_dropped_turns=self.shortened.num_turns,
            first_messages=self.shortened.first_messages,
            priority=request.priority,
            timeout_ms=request.timeout_ms,
            cache_salt=request.cache_salt,
            arrived_at=arrived_at,
        )


class PromptBuilder:
    """Raises RequestError for everything that a client can do wrong."""

    def __init__(
        self,
        reader: RequestReader,
        tokenizer: Tokenizer,
        conversation: Conversation,
        connection: EngineConnection,
        *,
        log_prompts: bool,
    ) -> None:
        self._reader = reader
        self._tokenizer = tokenizer
        self._conversation = conversation
        self._connection = connection
        self._log_prompts = log_prompts

    def read(self, raw: RawRequest) -> GenerationRequest:
        return self._reader.read(raw, self._info())

    def stateless(self, request: GenerationRequest) -> Prompt:
        """The prompt of a request without a session."""
        return self.turn(request, NOTHING_BEFORE)

    def turn(self, request: GenerationRequest, begun: TurnBegun) -> Prompt:
        """The prompt of a session's turn: the whole conversation."""
        content = request.content
        assert content is not None, "only a session can be ended without content"
        whole = Shortened(begun, content.messages or [])
        try:
            if content.messages is None:
                prompt = self._conversation.raw_turn(begun, content.text, content.ids or [])
            elif request.context_overflow == DROP_OLDEST_TURNS:
                session_len, max_tokens = self._info().session_len, request.params.max_tokens
                render = partial(self._templated, content)
                whole, prompt = fitting_prompt(whole, render, session_len, max_tokens)
            else:
                prompt = self._templated(content, whole)
        except TemplateError as error:
            raise RequestError(str(error)) from None
        return self._checked(request, whole, prompt)

    def _templated(self, content: Content, shortened: Shortened) -> TurnPrompt:
        return self._conversation.turn(shortened.begun, shortened.messages, content.tools)

    def _checked(self, request: GenerationRequest, shortened: Shortened, prompt: TurnPrompt) -> Prompt:
        if self._log_prompts:
            text = self._tokenizer.decode(prompt.ids)
            _logger.info("event=prompt request_id=%s text=%s", quoted(request.request_id), quoted(text))
        num_tokens, session_len = len(prompt.ids), self._info().session_len
        history_len = shortened.begun.history_len
        if shortened.num_exchanges:
            history_len = prompt.turn_ends[-1] if prompt.turn_ends else len(unpack_ids(shortened.begun.head))
        if num_tokens == 0:
            raise RequestError("The prompt has no tokens; send at least one.")
        if num_tokens >= session_len:
            history = f" ({history_len} of them are the session's history)" if history_len else ""
            raise RequestError(
                f"The context would have {num_tokens} tokens{history}; session_len = {session_len} allows at most "
                f"{session_len - 1}, so that one can be generated."
            )
        return Prompt(prompt.ids, prompt.turn_ends, max(0, num_tokens - history_len), shortened)

    def _info(self) -> ModelInfo:
        try:
            return self._connection.info
        except EngineUnavailableError as error:
            raise RequestError(str(error), "UNAVAILABLE") from None
