"""Turns of a session in the measuring process."""

import time
from pathlib import Path
from types import TracebackType

import msgspec
import torch

from limpet.backend.config import EngineConfig
from limpet.backend.offline import LocalEngine, new_sequence
from limpet.backend.sampling_params import SamplingParams
from limpet.benchmarks import result
from limpet.benchmarks.result import Result
from limpet.benchmarks.session_driver import SessionDriver, run


class TurnsInProcess:
    """The engine on a converted model's folder, prefix caching off."""

    def __init__(self, folder: Path, session_len: int, num_answer_tokens: int, *, random_weights: bool) -> None:
        config = EngineConfig(
            max_batch_size=1,
            enable_prefix_caching=False,
            load_format="dummy" if random_weights else "auto",
            session_len=session_len,
        )
        self._model = folder.name
        self._local = LocalEngine(folder, config)
        self._params = SamplingParams(temperature=0.0, max_tokens=num_answer_tokens, ignore_eos=True)
        self.vocab_size = self._local.engine.vocab_size

    def in_session(self, prompts: list[list[int]]) -> list[tuple[float, int]]:
        """The turns of one session; (seconds to the first token, cached tokens) of each."""
        driver = SessionDriver(self._local.engine, self._params)
        measured = [driver.ask("session", new) for new in prompts]
        driver.end("session")
        return measured

    def whole(self, prompts: list[list[int]]) -> list[tuple[float, int]]:
        """The same for a client that sends the whole conversation with each turn."""
        engine = self._local.engine
        history: list[int] = []
        measured = []
        for number, new in enumerate(prompts):
            started = time.perf_counter()
            sequence = new_sequence(number, history + new, self._params, frozenset())
            engine.add(sequence)
            measured.append((run(engine, sequence, started), sequence.num_cached or 0))
            engine.discard(sequence)
            history = list(sequence.tokens)
        return measured

    def described(self, base: Result) -> Result:
        summary = self._local.summary
        on_gpu = summary.device.startswith("cuda")
        gpu = torch.cuda.get_device_name() if on_gpu else ""
        return msgspec.structs.replace(
            base,
            machine=gpu or result.cpu_machine(),
            gpu=gpu,
            torch=str(torch.__version__),
            model=self._model,
            dtype=summary.dtype,
            block_size=summary.block_size,
            threads=None if on_gpu else torch.get_num_threads(),
        )

    def __enter__(self) -> "TurnsInProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._local.close()
