"""Where a decode step's time goes on a GPU: each kernel's share, the gaps in which the GPU waits for the host, and the
bandwidth floor.

python -m benchmarks.breakdown --model llama-2-7b --batches 1 256
"""

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from limpet.backend.config import EngineConfig
from limpet.backend.engine import Engine
from limpet.backend.offline import LocalEngine, new_sequence
from limpet.backend.sampling_params import SamplingParams
from limpet.benchmarks.floor import copy_rate, step_bytes
from limpet.benchmarks.model_shapes import SHAPES, write_shape
from limpet.benchmarks.workload import uniform

WARM_STEPS, STEPS = 20, 20
NAME_WIDTH = 90
COLLECTIVES = ("nccl", "sum_and_norm")  # in the kernels' names


def profile_decodes(engine: Engine, batch: int, prompt_tokens: int) -> None:
    """Print the kernels of a decode step, of `batch` sequences some steps after their prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=WARM_STEPS + STEPS + 60, ignore_eos=True)
    sequences = [
        new_sequence(index, request.prompt, params, frozenset())
        for index, request in enumerate(uniform(engine.vocab_size, batch, prompt_tokens, 1))
    ]
    for sequence in sequences:
        engine.add(sequence)
    while any(sequence.num_generated == 0 for sequence in sequences):
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
    _print_table(profiled, f"{batch} sequences, {prompt_tokens} prompt tokens")
    for sequence in sequences:
        engine.stop(sequence)
        engine.discard(sequence)
    while engine.has_work:
        engine.step()


def _print_table(profiled: profile, title: str) -> None:
    events = [event for event in profiled.events() if event.device_type.name == "CUDA"]  # type: ignore[no-untyped-call]
    start = min(event.time_range.start for event in events)
    end = max(event.time_range.end for event in events)
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        times[event.name].append(event.time_range.elapsed_us())
    busy_us = sum(map(sum, times.values()))
    print(f"\n{title}: {(end - start) / STEPS:.0f} us a step, of which the GPU is busy {busy_us / STEPS:.0f} us")
    shared_us = sum(sum(each) for name, each in times.items() if any(mark in name.lower() for mark in COLLECTIVES))
    if shared_us:
        print(f"collectives, waiting for the other ranks included: {shared_us / STEPS:.0f} us a step")
    print(f"{'us a step':>10}{'calls':>8}{'us each':>9}  kernel")
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:25]:
        print(f"{sum(each) / STEPS:10.1f}{len(each) / STEPS:8.1f}{sum(each) / len(each):9.2f}  {name[:NAME_WIDTH]}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.breakdown")
    parser.add_argument("--model", choices=SHAPES, default="llama-2-7b")
    parser.add_argument("--layers", type=int, help="so many of the model's")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--all-reduce", choices=("auto", "nccl"), default="auto")
    parser.add_argument("--block-size", type=int, choices=(16, 32, 64, 128), default=64)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--prompt-tokens", type=int, default=256)
    arguments = parser.parse_args()
    config = EngineConfig(
        max_batch_size=max(arguments.batches),
        session_len=4096,
        cache_block_seq_len=arguments.block_size,
        enable_prefix_caching=False,
        dtype="bfloat16",
        load_format="dummy",
        tp=arguments.tp,
        all_reduce=arguments.all_reduce,
    )
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_shape(arguments.model, Path(folder), arguments.layers)
        with LocalEngine(model_dir, config) as local:
            rate = copy_rate()
            for batch in arguments.batches:
                profile_decodes(local.engine, batch, arguments.prompt_tokens)
                if arguments.tp > 1 or arguments.layers is not None:
                    continue
                kv_len = arguments.prompt_tokens + WARM_STEPS + STEPS // 2
                read = step_bytes(SHAPES[arguments.model], batch, kv_len)
                print(f"floor {1e6 * read / rate:.0f} us: {read / 1e9:.2f} GB at the {rate / 1e9:.0f} GB/s of a copy")


if __name__ == "__main__":
    main()
