"""The engine in your own process, without a server.

from pathlib import Path
from limpet.backend.offline import LocalEngine
from limpet.backend.sampling_params import SamplingParams

with LocalEngine(Path("workspace/model_repository/smollm2")) as engine:
    [completion] = engine.generate([[1, 4093, 198]], SamplingParams(temperature=0, max_tokens=32))
"""

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from limpet.backend.build import build_engine
from limpet.backend.checkpoint import CheckpointDir
from limpet.backend.config import EngineConfig
from limpet.backend.core import Sequence
from limpet.backend.link.messages import FinishReason
from limpet.backend.sampling_params import SamplingParams


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt; `ids` includes the end id that ended it."""

    ids: list[int]
    finish_reason: FinishReason
    num_cached_tokens: int


class LocalEngine:
    """An engine for token ids in, token ids out; raises ConfigError, CheckpointError or RequestError."""

    def __init__(self, model_dir: Path, config: EngineConfig | None = None) -> None:
        self.engine, self.summary = build_engine(model_dir, config or EngineConfig())
        self._eos_ids = frozenset(CheckpointDir(model_dir).model_config().eos_token_ids)

    def generate(
        self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answer all prompts, as one persistent batch; `params` for all of them or one for each."""
        each = params if isinstance(params, list) else [params or SamplingParams()] * len(prompts)
        sequences = [
            new_sequence(index, prompt, settings, self._eos_ids)
            for index, (prompt, settings) in enumerate(zip(prompts, each, strict=True))
        ]
        for sequence in sequences:
            self.engine.add(sequence)
            if sequence.guidance is not None and (error := sequence.guidance.wait()) is not None:
                raise error
        completions: dict[int, Completion] = {}
        while len(completions) < len(sequences):
            completions.update(self._step())
        return [completions[index] for index in range(len(sequences))]

    def _step(self) -> dict[int, Completion]:
        ended = {}
        for output in self.engine.step():
            if output.error is not None:
                raise output.error
            if output.finish_reason is not None:
                sequence = output.sequence
                self.engine.discard(sequence)
                ids = sequence.tokens[sequence.num_prompt :]
                assert isinstance(sequence.key, int)
                ended[sequence.key] = Completion(ids, output.finish_reason, sequence.num_cached or 0)
        return ended

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> "LocalEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def new_sequence(
    key: object, prompt: list[int], params: SamplingParams, eos_ids: frozenset[int], cache_salt: str = ""
) -> Sequence:
    """A sequence that ends at the model's end ids (unless ignored, without a guide) and at the request's own."""
    ignores_eos = params.ignore_eos and params.guide is None
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if ignores_eos else eos_ids)
    max_tokens = params.max_tokens if params.max_tokens is not None else 2**62
    return Sequence(
        key=key, tokens=list(prompt), params=params, max_tokens=max_tokens, stop_ids=stop_ids, cache_salt=cache_salt
    )
