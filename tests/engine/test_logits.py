"""Logits of real families' shapes equal transformers' in float32, at every position and however the work is cut up.

The runner is driven by hand, with known ids: prompts whole or in chunks, mixed with decodes, in shuffled blocks of a
cache that is full of NaN.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from limpet.backend.checkpoint import CheckpointDir
from limpet.backend.core import RowStart, RowWork, StepPlan
from limpet.backend.models.registry import build_model
from limpet.backend.runner import Runner
from limpet.backend.sampling_params import SamplingParams
from limpet.backend.weights import load_weights
from tests.aids.families import BASE, FAMILIES, convert_family
from tests.aids.tiny_models import ConvertedTiny

PROMPT_LENGTHS = (1, 5, 130, 64, 17, 300)
NUM_DECODES = 9
LENGTHS = [length + NUM_DECODES for length in PROMPT_LENGTHS]
SESSION_LEN = 512
# Largest ||logits - reference|| / ||reference|| of a position.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ConvertedTiny:
    return convert_family(tmp_path_factory.mktemp("family"), request.param)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, BASE["vocab_size"], (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(model: ConvertedTiny, texts: list[list[int]]) -> list[Tensor]:
    """Of each text, transformers' logits at every position. # [length, vocab]"""
    with torch.inference_mode():
        return [model.reference(torch.tensor([ids])).logits[0] for ids in texts]


def open_runner(model_dir: Path, block_size: int, device: str, dtype: torch.dtype, *, with_graphs: bool) -> Runner:
    checkpoint = CheckpointDir(model_dir)
    config, where = checkpoint.model_config(), torch.device(device)
    model = build_model(config, SESSION_LEN, where, dtype)
    load_weights(model, checkpoint)
    runner = Runner(
        model,
        config,
        block_size=block_size,
        num_rows=len(LENGTHS) + 2,
        session_len=SESSION_LEN,
        max_prefill_tokens=sum(LENGTHS),
        device=where,
        dtype=dtype,
    )
    runner.allocate(sum(-(-length // block_size) for length in LENGTHS))
    if with_graphs:
        runner.capture()
    runner.cache.fill_(float("nan"))
    return runner


def teacher_forced(runner: Runner, texts: list[list[int]], block_size: int, chunk: int) -> list[dict[int, Tensor]]:
    """Logits by position of each text: its prompt in chunks, then one token a step, all texts side by side."""
    rows = [index + 1 for index in range(len(texts))]
    blocks = torch.randperm(
        sum(-(-len(ids) // block_size) for ids in texts), generator=torch.Generator().manual_seed(2)
    )
    tables = blocks.split([-(-len(ids) // block_size) for ids in texts])
    starts = [
        RowStart(row, SamplingParams(temperature=0.0), table.tolist()) for row, table in zip(rows, tables, strict=True)
    ]
    done, found = [0] * len(texts), [dict[int, Tensor]() for _ in texts]
    while any(count < len(ids) for count, ids in zip(done, texts, strict=True)):
        works: list[tuple[int, RowWork]] = []
        for index, ids in enumerate(texts):
            left_of_prompt = PROMPT_LENGTHS[index] - done[index]
            count = min(chunk, left_of_prompt) if left_of_prompt > 0 else int(done[index] < len(ids))
            if count:
                part = ids[done[index] : done[index] + count]
                works.append((index, RowWork(rows[index], done[index], count, part, [], left_of_prompt <= count)))
                done[index] += count
        works.sort(key=lambda pair: pair[1].num_tokens > 1)
        handle = runner.forward(StepPlan([], starts, [work for _, work in works]))
        starts = []
        logits = iter(handle.result.result().logits.float().cpu())
        for index, work in works:
            if work.samples:
                found[index][done[index] - 1] = next(logits)
    return found


def check(
    model: ConvertedTiny,
    texts: list[list[int]],
    expected: list[Tensor],
    device: str,
    dtype: torch.dtype,
    *,
    block_size: int = 64,
    chunk: int = SESSION_LEN,
    with_graphs: bool = False,
) -> None:
    runner = open_runner(model.model_dir, block_size, device, dtype, with_graphs=with_graphs)
    found = teacher_forced(runner, texts, block_size, chunk)
    runner.close()
    for index, (logits, reference) in enumerate(zip(found, expected, strict=True)):
        assert len(logits) == NUM_DECODES + 1
        for position, row in logits.items():
            error = float((row - reference[position]).norm() / reference[position].norm())
            assert error <= TOLERANCES[dtype], f"text {index}, position {position}: off by {error:.1e}"


@devices
@pytest.mark.parametrize("chunk", [SESSION_LEN, 37], ids=["whole", "chunked"])
def test_float32(model: ConvertedTiny, texts: list[list[int]], expected: list[Tensor], device: str, chunk: int) -> None:
    check(model, texts, expected, device, torch.float32, chunk=chunk)


@pytest.mark.gpu
@pytest.mark.parametrize("with_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_on_a_gpu(
    model: ConvertedTiny,
    texts: list[list[int]],
    expected: list[Tensor],
    block_size: int,
    dtype: torch.dtype,
    with_graphs: bool,
) -> None:
    check(model, texts, expected, "cuda", dtype, block_size=block_size, chunk=100, with_graphs=with_graphs)
