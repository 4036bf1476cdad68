"""How many different answers one prompt gets at temperature 0, alone and in ever new company.

    python -m limpet.benchmarks.same_answer --model deepseek-v2-lite --deterministic

Random weights make many near-ties: without deterministic mode company changes some answers.
"""

import argparse
import random
import tempfile
from pathlib import Path

from limpet.backend.config import EngineConfig
from limpet.backend.offline import LocalEngine
from limpet.backend.sampling_params import SamplingParams
from limpet.benchmarks.model_shapes import SHAPES, write_shape

PROMPT_TOKENS = 100
COMPANY_TOKENS = (10, 400)


def distinct_answers(local: LocalEngine, concurrency: int, rounds: int, num_tokens: int) -> int:
    """Different answers to one prompt in so many rounds, each among `concurrency` - 1 random prompts of that round."""
    generator = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    watched = _prompt(generator, local, PROMPT_TOKENS)
    answers = set()
    for _ in range(rounds):
        prompts = [_prompt(generator, local, generator.randint(*COMPANY_TOKENS)) for _ in range(concurrency - 1)]
        place = generator.randrange(concurrency)
        prompts.insert(place, watched)
        answers.add(tuple(local.generate(prompts, params)[place].ids))
    return len(answers)


def _prompt(generator: random.Random, local: LocalEngine, length: int) -> list[int]:
    return [generator.randrange(local.engine.vocab_size) for _ in range(length)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.same_answer", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="deepseek-v2-lite")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    arguments = parser.parse_args()
    config = EngineConfig(
        session_len=2048,
        max_batch_size=max(arguments.concurrency),
        enable_prefix_caching=False,
        deterministic=arguments.deterministic,
        device=arguments.device,
        load_format="dummy",
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalEngine(write_shape(arguments.model, Path(folder)), config) as local,
    ):
        for concurrency in arguments.concurrency:
            count = distinct_answers(local, concurrency, arguments.rounds, arguments.tokens)
            print(f"{count} different answers in {arguments.rounds} rounds at concurrency {concurrency}", flush=True)


if __name__ == "__main__":
    main()
