"""A front end put together: one model instance's tokenizer, template, threads and link to the engine."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from limpet.backend.chat_template import ChatTemplate
from limpet.backend.checkpoint import CheckpointDir
from limpet.backend.config import EngineConfig
from limpet.backend.detokenizer import DetokenizerFactory
from limpet.backend.front_end.answer import Answer, Refused, Services
from limpet.backend.front_end.conversation import Conversation
from limpet.backend.front_end.errors import RequestError
from limpet.backend.front_end.prompts import PromptBuilder
from limpet.backend.front_end.request import RequestReader
from limpet.backend.front_end.responses import Responder
from limpet.backend.front_end.senders import SenderPool
from limpet.backend.front_end.triton_request import read_triton_request
from limpet.backend.link.connection import EngineConnection
from limpet.backend.tokenizer import Tokenizer

_logger = logging.getLogger(__name__)
_MAX_WORKERS = 4  # tokenizing runs outside the interpreter lock, templates inside


class FrontEnd:
    """Accepts requests; everything after `accept` happens on its own threads."""

    def __init__(
        self, model_dir: Path, config: EngineConfig, connection: EngineConnection, *, streams: bool = True
    ) -> None:
        """Raises CheckpointError or TemplateError for a model that cannot be served."""
        checkpoint = CheckpointDir(model_dir)
        tokenizer = Tokenizer.load(checkpoint)
        source = checkpoint.chat_template()
        template = ChatTemplate(source, tokenizer.config) if source is not None else None
        reader = RequestReader(
            tokenizer,
            tokenizer.config.generation,
            template is not None,
            config.default_exclude_input,
            config.context_overflow,
            streams=streams,
        )
        self._connection = connection
        self._workers = ThreadPoolExecutor(min(_MAX_WORKERS, os.cpu_count() or 1), "limpet-worker")
        self._senders = SenderPool()
        self._services = Services(
            connection=connection,
            prompts=PromptBuilder(
                reader, tokenizer, Conversation(tokenizer, template), connection, log_prompts=config.log_prompts
            ),
            new_detokenizer=DetokenizerFactory(tokenizer),
            token_text=tokenizer.decoded_token,
            workers=self._workers,
            is_durable=bool(config.session_store),
        )

    def accept(self, request: Any) -> None:
        """Take over a pb_utils.InferenceRequest: it gets its FINAL response from here, whatever happens."""
        answer = Answer(self._services, self._senders.next_thread(), Responder(request.get_response_sender()))
        try:
            answer.start(read_triton_request(request))
        except Exception:
            _logger.exception("A request could not be accepted.")
            answer.deliver(Refused(RequestError("The request could not be read; the log says why.", "INTERNAL")))

    def stop(self) -> None:
        """Answer what is still open with an error, leave the engine, end all threads."""
        self._workers.shutdown()
        self._connection.stop()
        self._senders.stop()
