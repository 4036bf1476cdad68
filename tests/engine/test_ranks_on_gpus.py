"""On two GPUs, with heads as real models have them and CUDA graphs: as near to float32 as one GPU is."""

import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest
import torch

from limpet.backend.config import EngineConfig
from limpet.backend.offline import LocalEngine
from limpet.backend.sampling_params import SamplingParams
from tests.aids.deepseek import LARGE_SHAPES
from tests.aids.engine_process import engine_process
from tests.aids.families import FAMILIES, convert_family
from tests.aids.live_server import wait_ended
from tests.aids.tiny_models import ConvertedTiny, convert_tiny
from tests.engine.test_logprobs import asking, raw_logprobs, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LENGTHS = (1, 5, 130, 64, 17, 300)
NUM_TOKENS = 12
# What bf16 may add to the mean error of a logprob where sums are cut in two.
FACTOR, MARGIN = 1.5, 2e-3


def convert(folder: Path, family: str) -> ConvertedTiny:
    return convert_family(folder, family) if family in FAMILIES else convert_tiny(folder, family)


def config_of(tp: int, **settings: object) -> EngineConfig:
    common = {
        "max_batch_size": len(LENGTHS) + 2,
        "session_len": 512,
        "max_prefill_token_num": 200,
        "cache_bytes": 64 << 20,
    }
    return EngineConfig(tp=tp, device="cuda", **(common | settings))  # type: ignore[arg-type]


def answer(model_dir: Path, config: EngineConfig, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Ids of each answer, and logprobs of its prompt's and its own ids; all prompts together."""
    with LocalEngine(model_dir, config) as local:
        answers = run(local, prompts, [asking(max_tokens=NUM_TOKENS, logprobs=0, prompt_logprobs=0)] * len(prompts))
    return [
        (
            [token for output in outputs for token in output.ids],
            [entry.logprob for output in outputs for entry in (*output.prompt_logprobs, *output.logprobs)],
        )
        for outputs in answers
    ]


def errors(
    tiny: ConvertedTiny, config: EngineConfig, vocab_size: int, lengths: tuple[int, ...] = LENGTHS
) -> torch.Tensor:
    """|logprob - float32's| of every id of prompts and answers.

    In a process of its own: torch's symmetric memory remembers the ranks that it first met.
    """
    prompts = [[(31 * length + 17 * place) % (vocab_size - 10) + 4 for place in range(length)] for length in lengths]
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        answers = process.submit(answer, tiny.model_dir, config, prompts).result()
    found: list[float] = []
    for prompt, (ids, logprobs) in zip(prompts, answers, strict=True):
        following = [*prompt[1:], *ids]
        distributions = raw_logprobs(tiny, prompt + ids)[:-1]
        expected = distributions.gather(1, torch.tensor(following).unsqueeze(1)).flatten()
        found += (torch.tensor(logprobs) - expected).abs().tolist()
    assert len(found) == sum(lengths) - len(lengths) + NUM_TOKENS * len(lengths)
    return torch.tensor(found)


@pytest.mark.parametrize("all_reduce", ["auto", "nccl"])
@pytest.mark.parametrize("family", ["llama-3", "qwen3", *LARGE_SHAPES])
def test_two_gpus_are_as_near_to_float32_as_one(tmp_path: Path, family: str, all_reduce: str) -> None:
    if all_reduce == "nccl" and family != "llama-3":
        pytest.skip("one family is enough")
    tiny = convert(tmp_path, family)
    vocab_size = tiny.reference.config.vocab_size
    alone = errors(tiny, config_of(1, dtype="bfloat16"), vocab_size)
    shared = errors(tiny, config_of(2, dtype="bfloat16", all_reduce=all_reduce), vocab_size)
    print(f"{family}, {all_reduce}: mean {alone.mean():.2e} alone, {shared.mean():.2e} shared; max {shared.max():.2e}")
    assert shared.mean() <= FACTOR * alone.mean() + MARGIN
    assert shared.quantile(0.95) <= FACTOR * alone.quantile(0.95) + MARGIN


@pytest.mark.parametrize("family", ["llama-3", "v2, true heads"])
def test_two_gpus_in_float32_are_exact(tmp_path: Path, family: str) -> None:
    tiny = convert(tmp_path, family)
    assert errors(tiny, config_of(2, dtype="float32"), tiny.reference.config.vocab_size).max() <= 1e-3


@pytest.mark.parametrize("all_reduce", ["auto", "nccl"])
def test_a_step_of_many_tokens(tmp_path: Path, all_reduce: str) -> None:
    """Products so large that the ranks add one piece while they compute the next, where no kernel does both."""
    tiny = convert(tmp_path, "llama-3")
    long = {"session_len": 4096, "max_prefill_token_num": 4096, "cache_bytes": 256 << 20}
    vocab_size, lengths = tiny.reference.config.vocab_size, (2600, 30)
    alone = errors(tiny, config_of(1, dtype="bfloat16", **long), vocab_size, lengths)
    shared = errors(tiny, config_of(2, dtype="bfloat16", all_reduce=all_reduce, **long), vocab_size, lengths)
    print(f"{all_reduce}: mean {alone.mean():.2e} alone, {shared.mean():.2e} shared; max {shared.max():.2e}")
    assert shared.mean() <= FACTOR * alone.mean() + MARGIN


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_engine(tmp_path: Path, number: signal.Signals) -> None:
    parameters = {"device": "cuda", "tp": "2", "cache_bytes": str(64 << 20), "max_batch_size": "4"}
    with engine_process(convert_tiny(tmp_path, "eight-heads").model_dir, parameters) as running:
        front_end = running.connect()
        [rank] = psutil.Process(running.process.pid).children()
        key = front_end.submit([5, 17], SamplingParams(temperature=0.0, ignore_eos=True))
        front_end.collect(key, at_least=10)
        rank.send_signal(number)
        assert running.process.wait(25) == 1
        front_end.drop()
        assert not wait_ended([rank], 5)
