"""Guided decoding: guides become grammars off the step, and each answer walks through its own (xgrammar).

An answer's grammar is at the place where its known ids have led. So the ids that a step may draw are known only when
those of the step before are, while that step's forward pass runs already: the engine fills them in between the two.
Nothing is ever rolled back.
"""

import logging
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from limpet.backend.checkpoint import CheckpointDir
from limpet.backend.core import RequestError
from limpet.backend.detokenizer import DetokenizerFactory
from limpet.backend.json_grammar import json_grammar
from limpet.backend.regex_grammar import whole_text_grammar
from limpet.backend.sampling_params import Guide
from limpet.backend.staging import Array
from limpet.backend.token_masks import WORD_BITS
from limpet.backend.tokenizer import Tokenizer

if TYPE_CHECKING:
    import xgrammar

logger = logging.getLogger(__name__)

_NUM_WORKERS = 2  # a guide that takes long does not hold up all others
_CACHE_BYTES = 256 << 20  # of compiled grammars
_PLACE_IN_SOURCE = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: .* is false: )?")


class Guidance:
    """One answer's way through its grammar, which may still be compiling."""

    def __init__(self, compiled: "Future[xgrammar.CompiledGrammar]") -> None:
        self._compiled = compiled
        self._matcher: xgrammar.GrammarMatcher | None = None

    @property
    def is_ready(self) -> bool:
        """Compiled, and can be followed."""
        return self._compiled.done() and self._compiled.exception() is None

    @property
    def error(self) -> RequestError | None:
        """Why the guide cannot be followed; None while it is compiling."""
        return self.wait() if self._compiled.done() else None

    def wait(self) -> RequestError | None:
        """Wait for the compiler; why the guide cannot be followed."""
        error = self._compiled.exception()
        if error is None or isinstance(error, RequestError):
            return error
        logger.error("A guide could not be compiled.", exc_info=error)
        return RequestError("INTERNAL", "The response_format could not be compiled; the server's log says why.")

    @property
    def matcher(self) -> "xgrammar.GrammarMatcher":
        if self._matcher is None:
            import xgrammar

            self._matcher = xgrammar.GrammarMatcher(self._compiled.result())
        return self._matcher

    @property
    def is_over(self) -> bool:
        """The answer has its end id."""
        return bool(self.matcher.is_terminated())

    def accept(self, token: int) -> bool:
        """Go on by one id of the answer; False if the grammar does not allow it."""
        return bool(self.matcher.accept_token(token))


class GuideCompiler:
    """Compiles one model's guides on threads of its own; xgrammar is loaded when the first one comes."""

    def __init__(self, checkpoint: CheckpointDir, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._checkpoint = checkpoint
        self._vocab_size = vocab_size
        self._end_ids = list(end_ids)
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="limpet-guide")
        self._lock = threading.Lock()
        self._compiler: xgrammar.GrammarCompiler | None = None
        self.on_compiled: Callable[[], None] = lambda: None  # called on a worker

    def begin(self, guide: Guide) -> Guidance:
        """Start compiling; raises RequestError where no guide can work."""
        if not self._end_ids:
            raise RequestError("INVALID_ARG", "response_format needs a model with an end id; this one has none.")
        compiled = self._workers.submit(self._compile, guide)
        compiled.add_done_callback(lambda _: self.on_compiled())
        return Guidance(compiled)

    def fill(self, guidances: Sequence[Guidance]) -> Array:
        """The ids that each may go on with, as TokenMasks has them. # [len(guidances), ceil(vocab / 32)]"""
        bits = np.full((len(guidances), -(-self._vocab_size // WORD_BITS)), -1, dtype=np.int32)
        for index, guidance in enumerate(guidances):
            guidance.matcher.fill_next_token_bitmask(bits, index)
        return bits

    def close(self) -> None:
        self._workers.shutdown(cancel_futures=True)

    def _compile(self, guide: Guide) -> "xgrammar.CompiledGrammar":
        compiler = self._loaded()
        try:
            match guide.kind:
                case "json_schema":
                    return compiler.compile_grammar(json_grammar(guide.source))
                case "regex":
                    return compiler.compile_grammar(whole_text_grammar(guide.source))
                case "grammar":
                    return compiler.compile_grammar(guide.source)
        except (RuntimeError, ValueError) as error:
            reason = _PLACE_IN_SOURCE.sub("", str(error)).strip().split("\n")[0].rstrip(".")
            raise RequestError("INVALID_ARG", f"The {guide.kind} cannot be followed: {reason}.") from None

    def _loaded(self) -> "xgrammar.GrammarCompiler":
        with self._lock:
            if self._compiler is None:
                self._compiler = self._load()
            return self._compiler

    def _load(self) -> "xgrammar.GrammarCompiler":
        import xgrammar

        token_bytes = DetokenizerFactory(Tokenizer.load(self._checkpoint)).token_bytes
        # An end id is never text of the answer, though it may be an ordinary token.
        vocabulary: list[Any] = [
            b"" if token_id in self._end_ids else token_bytes(token_id) for token_id in range(self._vocab_size)
        ]
        info = xgrammar.TokenizerInfo(
            vocabulary, xgrammar.VocabType.RAW, vocab_size=self._vocab_size, stop_token_ids=self._end_ids
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE_BYTES)
