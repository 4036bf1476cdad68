"""Measure the kernels' meta-parameters on this GPU and keep the best: writes kernels/tuned/<device>.json.

    python -m benchmarks.tune --kernels attention linear

The candidates are compiled by several processes first, then timed one after the other as CUDA graphs, in bfloat16.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import geometric_mean
from typing import Literal, TypeAlias
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench_cudagraph

from limpet.benchmarks.tune_experts import tune_experts
from limpet.benchmarks.tune_latent import tune_latent
from limpet.benchmarks.tune_linear import tune_linear
from limpet.kernels import decode_attention, prefill_attention
from limpet.kernels.tuned_tables import table_path

Kernel: TypeAlias = Literal["decode_attention", "prefill_attention"]
Candidate: TypeAlias = tuple[int, ...]

BLOCK_SIZE = 64
# BLOCK_N, warps, stages; BLOCK_M, BLOCK_N, warps, stages
DECODE: list[Candidate] = [
    (block_n, warps, stages)
    for block_n, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4))
    if 8 <= block_n // warps <= 32
]
PREFILL: list[Candidate] = [
    (64, 32, 4, 3),
    (64, 64, 4, 2),
    (64, 64, 4, 3),
    (64, 128, 4, 2),
    (128, 32, 8, 3),
    (128, 64, 4, 3),
    (128, 64, 8, 2),
    (128, 64, 8, 3),
    (128, 64, 8, 4),
    (128, 128, 8, 2),
    (128, 128, 8, 3),
]
CANDIDATES: dict[Kernel, list[Candidate]] = {"decode_attention": DECODE, "prefill_attention": PREFILL}


@dataclass(frozen=True)
class Case:
    """What a key of the table is measured on: (sequences, new tokens, cached positions) of each load."""

    kernel: Kernel
    key: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    loads: tuple[tuple[int, int, int], ...]

    def call(self, load: tuple[int, int, int]) -> Callable[[], Tensor]:
        """One launch on random inputs of that load."""
        num_seqs, q_len, kv_len = load
        blocks_each = -(-kv_len // BLOCK_SIZE)
        shape = (num_seqs * blocks_each, BLOCK_SIZE, self.num_kv_heads, self.head_dim)
        k_cache, v_cache = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        tables = torch.randperm(shape[0], device="cuda").view(num_seqs, blocks_each).to(torch.int32)
        kv_lens = torch.full((num_seqs,), kv_len, dtype=torch.int32, device="cuda")
        q = torch.randn(num_seqs * q_len, self.num_heads, self.head_dim, dtype=torch.bfloat16, device="cuda")
        scale = self.head_dim**-0.5
        if self.kernel == "decode_attention":
            return lambda: decode_attention.decode_attention(q, k_cache, v_cache, tables, kv_lens, scale)
        cu_q_lens = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * q_len
        return lambda: prefill_attention.prefill_attention(
            q, k_cache, v_cache, tables, cu_q_lens, kv_lens, q_len, scale
        )


DECODE_LOADS = ((1, 1, 4000), (16, 1, 1000), (64, 1, 500), (256, 1, 300))
LONG_LOADS = ((4, 2048, 2048), (16, 512, 512), (2, 1024, 3000))
SHORT_LOADS = ((64, 8, 500), (16, 16, 1000))


def _cases() -> Iterator[Case]:
    for num_heads, num_kv_heads, head_dim in ((32, 32, 128), (32, 8, 128), (9, 3, 64)):
        group = num_heads // num_kv_heads
        heads = num_heads, num_kv_heads, head_dim
        key = decode_attention.tile_key(head_dim, 2, decode_attention.pick_block_heads(group))
        yield Case("decode_attention", key, *heads, DECODE_LOADS)
        for loads in (LONG_LOADS, SHORT_LOADS):
            yield Case("prefill_attention", prefill_attention.tile_key(head_dim, 2, loads[0][1] * group), *heads, loads)


@contextmanager
def _forced(kernel: Kernel, candidate: Candidate) -> Iterator[None]:
    module = decode_attention if kernel == "decode_attention" else prefill_attention
    with mock.patch.object(module, "pick_tile", return_value=candidate):
        yield


def _compile(case: Case, candidate: Candidate) -> None:
    """Compile into Triton's cache on disk; a candidate that needs more than the GPU has is skipped when timed."""
    with _forced(case.kernel, candidate):
        for load in case.loads:
            try:
                case.call(load)()
            except OutOfResources:
                return


def _time_us(case: Case, candidate: Candidate) -> list[float]:
    """Microseconds of each load, infinite if the candidate does not run."""
    times = []
    for load in case.loads:
        with _forced(case.kernel, candidate):
            try:
                times.append(1e3 * do_bench_cudagraph(case.call(load), rep=20, return_mode="median"))
            except OutOfResources:
                times.append(float("inf"))
        torch.cuda.empty_cache()
    return times


def _tune_attention(processes: ProcessPoolExecutor) -> dict[str, dict[str, Candidate]]:
    todo = [(case, candidate) for case in _cases() for candidate in CANDIDATES[case.kernel]]
    list(processes.map(_compile, *zip(*todo, strict=True)))
    costs: dict[tuple[Kernel, str], dict[Candidate, list[float]]] = {}
    for case, candidate in todo:
        times = _time_us(case, candidate)
        costs.setdefault((case.kernel, case.key), {}).setdefault(candidate, []).extend(times)
        shown = " ".join(f"{time:9.1f}" for time in times)
        print(f"{case.kernel:18}{case.num_heads:3}/{case.num_kv_heads:<3}{candidate!s:18} us: {shown}", flush=True)
    table: dict[str, dict[str, Candidate]] = {}
    for (kernel, key), times_of in costs.items():
        best = min(times_of, key=lambda candidate: geometric_mean(times_of[candidate]))
        table.setdefault(kernel, {})[key] = best
    return table


FAMILIES: dict[str, Callable[[ProcessPoolExecutor], Mapping[str, Mapping[str, Sequence[int]]]]] = {
    "attention": _tune_attention,
    "linear": lambda processes: {"linear": tune_linear(processes)},
    "latent": tune_latent,
    "experts": lambda processes: {"mix_experts": tune_experts(processes)},
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.tune")
    parser.add_argument("--kernels", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    arguments = parser.parse_args()
    path = table_path(torch.cuda.get_device_name(0))
    table = json.loads(path.read_text("utf-8")) if path.exists() else {}  # what is not measured now stays
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as processes:
        for family in arguments.kernels:
            for kernel, entries in FAMILIES[family](processes).items():
                table[kernel] = table.get(kernel, {}) | entries
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(table, indent=2) + "\n", "utf-8")
    print(path.read_text("utf-8"))


if __name__ == "__main__":
    main()
