"""What the worker threads do for a request: check it, and turn its content into the prompt's ids."""

import logging
from dataclasses import dataclass

import msgspec

from limpet.backend.chat_template import TemplateError
from limpet.backend.front_end.conversation import Conversation, TurnPrompt
from limpet.backend.front_end.errors import RequestError
from limpet.backend.front_end.request import GenerationRequest, RawRequest, RequestReader
from limpet.backend.link.connection import EngineConnection, EngineUnavailableError
from limpet.backend.link.messages import ModelInfo, Submit, TurnBegun, pack_ids
from limpet.backend.tokenizer import Tokenizer

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """Ids ready for the engine; `num_input_tokens` of them are new in this turn."""

    ids: list[int]
    turn_ends: list[int]
    num_input_tokens: int

    def submit(self, key: int, request: GenerationRequest, arrived_at: float) -> Submit:
        """The message that starts generating."""
        messages = request.content.messages if request.content is not None else None
        return Submit(
            key=key,
            request_id=request.request_id,
            prompt=pack_ids(self.ids),
            params=request.params,
            messages=None if messages is None else msgspec.json.encode(messages).decode(),
            turn_ends=self.turn_ends,
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
        content = request.content
        assert content is not None, "only a session can be ended without content"
        if content.messages is not None:
            try:
                ids = self._conversation.chat(content.messages)
            except TemplateError as error:
                raise RequestError(str(error)) from None
        else:
            ids = content.ids if content.ids is not None else self._tokenizer.encode_prompt(content.text or "")
        return self._checked(request, TurnPrompt(ids), history_len=0)

    def turn(self, request: GenerationRequest, begun: TurnBegun) -> Prompt:
        """The prompt of a session's turn: the whole conversation."""
        content = request.content
        assert content is not None, "a turn has content"
        try:
            if content.messages is not None:
                prompt = self._conversation.turn(begun, content.messages)
            else:
                prompt = self._conversation.raw_turn(begun, content.text, content.ids or [])
        except TemplateError as error:
            raise RequestError(str(error)) from None
        return self._checked(request, prompt, begun.history_len)

    def _checked(self, request: GenerationRequest, prompt: TurnPrompt, history_len: int) -> Prompt:
        if self._log_prompts:
            text = msgspec.json.encode(self._tokenizer.decode(prompt.ids)).decode()
            _logger.info("event=prompt request_id=%s text=%s", request.request_id, text)
        num_tokens, session_len = len(prompt.ids), self._info().session_len
        if num_tokens == 0:
            raise RequestError("The prompt has no tokens; send at least one.")
        if num_tokens >= session_len:
            history = f" ({history_len} of them are the session's history)" if history_len else ""
            raise RequestError(
                f"The context would have {num_tokens} tokens{history}; session_len = {session_len} allows at most "
                f"{session_len - 1}, so that one can be generated."
            )
        return Prompt(prompt.ids, prompt.turn_ends, max(0, num_tokens - history_len))

    def _info(self) -> ModelInfo:
        try:
            return self._connection.info
        except EngineUnavailableError as error:
            raise RequestError(str(error), "UNAVAILABLE") from None
