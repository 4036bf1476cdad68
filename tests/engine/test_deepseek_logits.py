"""DeepSeek-V2's logits equal transformers' at every position, however the work is cut up.

Texts are up to five times as long as YaRN's original context. Chunks of one token are decodes, short chunks on a cached
context are absorbed, long ones are expanded.
"""

import pytest
import torch
from torch import Tensor

from limpet.backend.core import RowStart, RowWork, StepPlan
from limpet.backend.layers import latent_context
from limpet.backend.runner import Runner
from limpet.backend.sampling_params import SamplingParams
from tests.aids.deepseek import DEEPSEEK_SHAPES, LITE, YARN
from tests.aids.tiny_models import ConvertedTiny, convert_tiny
from tests.engine.test_logits import TOLERANCES, devices, open_runner

LENGTHS = (1, 40, 130, 309)
CHUNKS = {"decodes": 1, "absorbed": 7, "expanded": 61, "whole": 512}


@pytest.fixture(scope="module", params=DEEPSEEK_SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ConvertedTiny:
    return convert_tiny(tmp_path_factory.mktemp("deepseek"), request.param)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    assert max(LENGTHS) > 4 * YARN["original_max_position_embeddings"]
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, LITE["vocab_size"], (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(model: ConvertedTiny, texts: list[list[int]]) -> list[Tensor]:
    """Of each text, transformers' logits at every position. # [length, vocab]"""
    with torch.inference_mode():
        return [model.reference(torch.tensor([ids])).logits[0] for ids in texts]


@torch.inference_mode()
def all_logits(runner: Runner, texts: list[list[int]], chunk: int) -> list[Tensor]:
    """Logits of every position of each text, all texts side by side in chunks, their blocks shuffled."""
    counts = [-(-len(ids) // 16) for ids in texts]
    tables = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(2)).split(counts)
    starts = [RowStart(row, SamplingParams(), table.tolist()) for row, table in enumerate(tables)]
    done, found = 0, [list[Tensor]() for _ in texts]
    while done < max(map(len, texts)):
        parts = [(row, ids[done : done + chunk]) for row, ids in enumerate(texts) if len(ids) > done]
        parts.sort(key=lambda part: len(part[1]) > 1)  # decodes first
        plan = StepPlan([], starts, [RowWork(row, done, len(ids), ids, [], True) for row, ids in parts])
        runner._batch.apply(plan)
        logits = runner._model.logits(runner._hidden(runner._batch.inputs(plan)))
        for (row, _), part in zip(parts, logits.float().cpu().split([len(ids) for _, ids in parts]), strict=True):
            found[row].append(part)
        starts, done = [], done + chunk
    return [torch.cat(parts) for parts in found]


def check(
    model: ConvertedTiny, texts: list[list[int]], expected: list[Tensor], device: str, dtype: torch.dtype, chunk: int
) -> None:
    runner = open_runner(model.model_dir, 16, device, dtype, with_graphs=False)
    found = all_logits(runner, texts, chunk)
    runner.close()
    for index, (logits, reference) in enumerate(zip(found, expected, strict=True)):
        errors = (logits - reference).norm(dim=1) / reference.norm(dim=1)
        assert errors.shape == (LENGTHS[index],)
        assert bool((errors <= TOLERANCES[dtype]).all()), (
            f"text {index}: off by {errors.max():.1e} at {errors.argmax()}"
        )


@devices
@pytest.mark.parametrize("form", CHUNKS)
def test_float32(model: ConvertedTiny, texts: list[list[int]], expected: list[Tensor], device: str, form: str) -> None:
    check(model, texts, expected, device, torch.float32, CHUNKS[form])


@devices
def test_context_in_many_pieces(
    model: ConvertedTiny, texts: list[list[int]], expected: list[Tensor], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent_context, "PIECE_TOKENS", 50)
    check(model, texts, expected, device, torch.float32, CHUNKS["expanded"])
