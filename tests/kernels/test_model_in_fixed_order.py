"""Models on the Triton kernels in fixed order: a token's logits have the same bits in any batch and any chunking."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from limpet.backend.checkpoint import CheckpointDir
from limpet.backend.core import RowStart, RowWork, StepPlan
from limpet.backend.layers.fixed_order import fix_order
from limpet.backend.models.registry import build_model
from limpet.backend.runner import Runner
from limpet.backend.sampling_params import SamplingParams
from limpet.backend.weights import load_weights
from limpet.kernels import launchers, reference
from tests.aids.tiny_models import convert_tiny
from tests.kernels.conftest import INTERPRETED

TEXT = [5, 17, 123, 44, 9, 250, 7, *range(20, 40)]
COMPANION = list(range(100, 140))
NUM_PROMPT = 24
BLOCK_SIZE = 16


def open_runner(model_dir: Path) -> Runner:
    checkpoint = CheckpointDir(model_dir)
    config, device = checkpoint.model_config(), torch.device("cpu")
    model = build_model(config, 64, device, torch.float32)
    load_weights(model, checkpoint)
    fix_order(model)
    sizes = {"block_size": BLOCK_SIZE, "num_rows": 2, "session_len": 64, "max_prefill_tokens": 64}
    runner = Runner(model, config, **sizes, device=device, dtype=torch.float32)
    runner.allocate(8)
    return runner


def logits_of(runner: Runner, chunk: int, companion_chunk: int) -> list[Tensor]:
    """Logits of the last prompt token of TEXT and of those after it; beside it the companion in chunks (0: alone)."""
    params = SamplingParams(temperature=0.0)
    starts = [RowStart(0, params, [2, 5]), RowStart(1, params, [0, 7, 3])]
    done, found = [0, 0], []
    while done[0] < len(TEXT):
        counts = [min(chunk, NUM_PROMPT - done[0]) if done[0] < NUM_PROMPT else 1]
        counts.append(min(companion_chunk, len(COMPANION) - done[1]))
        work = []
        for row, (ids, count) in enumerate(zip((TEXT, COMPANION), counts, strict=True)):
            if count:
                work.append(RowWork(row, done[row], count, ids[done[row] : done[row] + count], [], True))
                done[row] += count
        work.sort(key=lambda item: item.num_tokens > 1)
        logits = runner.forward(StepPlan([], starts, work)).result.result().logits
        starts = []
        if done[0] >= NUM_PROMPT:
            found.append(logits[[item.row for item in work].index(0)])
    return found


@pytest.mark.parametrize("shape", ["grouped-query", pytest.param("v2", marks=pytest.mark.long)])
@pytest.mark.usefixtures("rowwise_products")
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.skipif(not INTERPRETED, reason="the interpreter's arrays are the CPU's")
def test_bits_do_not_depend_on_company_or_chunks(tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in launchers.__all__:
        monkeypatch.setattr(reference, name, getattr(launchers, name))
    runner = open_runner(convert_tiny(tmp_path, shape).model_dir)
    alone = logits_of(runner, NUM_PROMPT, 0)
    for chunk, companion_chunk in ((7, 0), (NUM_PROMPT, 11), (5, 3)):
        for logits, expected in zip(logits_of(runner, chunk, companion_chunk), alone, strict=True):
            assert torch.equal(logits, expected), f"chunks of {chunk} beside chunks of {companion_chunk}"
    runner.close()
