"""Which captured shape a step runs in, and that padding a step to a shape changes nothing. Captures: test_logits.py."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from limpet.backend.core import RowStart, RowWork, StepPlan
from limpet.backend.input_batch import StepShape
from limpet.backend.sampling_params import SamplingParams
from limpet.backend.step_graphs import MAX_PREFILLS, MIXED_TOKENS, ladders
from tests.aids.tiny_models import convert_tiny
from tests.engine.test_logits import open_runner

PLAN = StepPlan(
    copies=[],
    starts=[RowStart(row, SamplingParams(temperature=0.0), [row, row + 4]) for row in range(4)],
    work=[
        RowWork(2, 0, 1, [40], [], True),
        RowWork(0, 0, 1, [41], [], False),
        RowWork(3, 0, 17, list(range(50, 67)), [], True),
        RowWork(1, 0, 5, list(range(70, 75)), [], True),
    ],
)


def test_large_steps_of_decodes_are_padded_by_less_than_7_percent() -> None:
    decodes, mixed = ladders(300, 8192, captures_prefills=True)
    sizes = [shape.num_decodes for shape in decodes]
    assert sizes[0] == 1
    assert sizes[-1] == 300
    assert all((high - low - 1) / (low + 1) < 0.07 for low, high in pairwise(sizes) if low > 128)
    assert [shape.num_tokens for shape in mixed] == list(MIXED_TOKENS)
    assert mixed[0] == StepShape(16, 16, 8)
    assert mixed[-1] == StepShape(1024, 300, MAX_PREFILLS)


def test_shapes_end_with_the_largest_step() -> None:
    assert ladders(8, 20, captures_prefills=True).mixed[-1].num_tokens == 32
    assert ladders(8, 20, captures_prefills=False).mixed == []


@pytest.mark.parametrize("model", ["grouped-query", "v2"])
@pytest.mark.parametrize("shape", [StepShape(24, 4, 2), StepShape(64, 8, 4)], ids=str)
def test_a_padded_step_gives_the_same_logits(shape: StepShape, model: str, tmp_path: Path) -> None:
    model_dir = convert_tiny(tmp_path, model).model_dir
    runner = open_runner(model_dir, 16, "cpu", torch.float32, with_graphs=False)
    expected = runner.forward(PLAN).result.result().logits
    padded = runner._compute(runner._batch.inputs(PLAN, shape))
    runner.close()
    assert padded.shape[0] == shape.num_decodes
    torch.testing.assert_close(padded[: len(expected)], expected, rtol=1e-4, atol=1e-4)  # of another form of attention
