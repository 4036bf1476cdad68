"""The engine with the Triton kernels in the place of their twins: every call of every layer fits its launcher."""

from pathlib import Path

import pytest

from limpet.backend.config import EngineConfig
from limpet.backend.offline import LocalEngine
from limpet.backend.sampling_params import SamplingParams
from limpet.kernels import launchers, reference
from tests.aids.tiny_models import convert_tiny
from tests.kernels.conftest import INTERPRETED

PROMPTS = [[5, 17, 123, 44, 9, 250, 7], list(range(20, 47)), [3]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=1.2, max_tokens=3, ignore_eos=True, seed=5),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=3, ignore_eos=True, seed=6),
]


def generate(model_dir: Path) -> list[list[int]]:
    config = EngineConfig(
        device="cpu", cache_block_seq_len=16, max_prefill_token_num=24, max_batch_size=4, cache_bytes=1 << 20
    )
    with LocalEngine(model_dir, config) as engine:
        return [completion.ids for completion in engine.generate(PROMPTS, PARAMS)]


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter's arrays are the CPU's")
@pytest.mark.parametrize("shape", ["grouped-query", "v2"])
def test_ids_equal_the_twins(tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = convert_tiny(tmp_path, shape).model_dir
    expected = generate(model_dir)
    for name in launchers.__all__:
        monkeypatch.setattr(reference, name, getattr(launchers, name))
    assert generate(model_dir) == expected
