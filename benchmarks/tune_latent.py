"""Which tiles run latent attention quickest on this GPU, in its three forms: V2-Lite's 16 heads and V2's 128."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from statistics import geometric_mean
from types import ModuleType
from typing import NamedTuple, TypeAlias
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench_cudagraph

from limpet.kernels import expanded_attention, latent_decode_attention, prefill_attention

Candidate: TypeAlias = tuple[int, ...]

RANK, NOPE, ROPE, V_DIM = 512, 128, 64, 128
BLOCK_SIZE = 64
SCALE = 0.1
MODULES: dict[str, ModuleType] = {
    "latent_decode_attention": latent_decode_attention,
    "prefill_attention": prefill_attention,
    "expanded_attention": expanded_attention,
}
CANDIDATES: dict[str, list[Candidate]] = {
    # BLOCK_N, warps, stages
    "latent_decode_attention": [
        (16, 4, 4),
        (32, 4, 2),
        (32, 4, 3),
        (32, 8, 3),
        (64, 4, 2),
        (64, 8, 1),
        (64, 8, 2),
        (128, 8, 1),
    ],
    # BLOCK_M, BLOCK_N, warps, stages
    "prefill_attention": [
        (16, 32, 4, 2),
        (32, 32, 4, 2),
        (64, 16, 8, 2),
        (64, 32, 4, 2),
        (64, 32, 8, 2),
        (128, 16, 8, 2),
    ],
    "expanded_attention": [
        (64, 32, 4, 3),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (128, 32, 8, 3),
        (128, 64, 4, 2),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
    ],
}


class Case(NamedTuple):
    """A key of a table and the loads it is measured on: sequences, new tokens and cached positions of each."""

    kernel: str
    key: str
    num_heads: int
    loads: tuple[tuple[int, int, int], ...]


DECODE_LOADS = ((1, 1, 4000), (16, 1, 1000), (64, 1, 500), (256, 1, 350))
CASES = (
    Case("latent_decode_attention", latent_decode_attention.tile_key(RANK, 2, 16), 16, DECODE_LOADS),
    Case("latent_decode_attention", latent_decode_attention.tile_key(RANK, 2, 64), 128, DECODE_LOADS[:3]),
    Case("prefill_attention", prefill_attention.tile_key(RANK + ROPE, 2, 4096), 16, ((2, 200, 200), (2, 200, 3000))),
    Case("expanded_attention", expanded_attention.tile_key(NOPE + ROPE, 2), 16, ((4, 2048, 2048), (16, 512, 512))),
)


def tune_latent(processes: ProcessPoolExecutor) -> dict[str, dict[str, Candidate]]:
    """The entries of the kernels' tables."""
    todo = [(case, candidate) for case in CASES for candidate in CANDIDATES[case.kernel]]
    list(processes.map(_compile, *zip(*todo, strict=True)))
    table: dict[str, dict[str, Candidate]] = {}
    for case in CASES:
        times = {candidate: _times_us(case, candidate) for candidate in CANDIDATES[case.kernel]}
        for candidate, each in times.items():
            print(
                f"{case.kernel:24}{case.num_heads:4} {candidate!s:18} us:", *(f"{us:9.1f}" for us in each), flush=True
            )
        best = min(times, key=lambda candidate: geometric_mean(times[candidate]))
        table.setdefault(case.kernel, {})[case.key] = best
    return table


def _compile(case: Case, candidate: Candidate) -> None:
    """Compile into Triton's cache on disk; what the GPU cannot run is skipped when timed."""
    with mock.patch.object(MODULES[case.kernel], "pick_tile", return_value=candidate):
        for load in case.loads:
            try:
                _call(case, load)()
            except OutOfResources:
                return


def _times_us(case: Case, candidate: Candidate) -> list[float]:
    times = []
    with mock.patch.object(MODULES[case.kernel], "pick_tile", return_value=candidate):
        for load in case.loads:
            try:
                times.append(1e3 * float(do_bench_cudagraph(_call(case, load), rep=20, return_mode="median")))
            except OutOfResources:
                times.append(float("inf"))
    return times


def _call(case: Case, load: tuple[int, int, int]) -> Callable[[], object]:
    """One launch on random inputs of that load."""
    num_seqs, q_len, kv_len = load
    num_tokens = num_seqs * q_len
    cu_q_lens = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * q_len
    if case.kernel == "expanded_attention":
        q, k = _random(num_tokens, case.num_heads, NOPE + ROPE), _random(num_tokens, case.num_heads, NOPE)
        k_rope, v = _random(num_tokens, ROPE), _random(num_tokens, case.num_heads, V_DIM)
        return lambda: expanded_attention.expanded_attention(
            q, k, k_rope, v, cu_q_lens, cu_q_lens, q_len, SCALE, is_causal=True
        )
    blocks_each = -(-kv_len // BLOCK_SIZE)
    cache = _random(num_seqs * blocks_each, BLOCK_SIZE, RANK + ROPE)
    tables = torch.randperm(num_seqs * blocks_each, device="cuda").view(num_seqs, blocks_each).to(torch.int32)
    kv_lens = torch.full((num_seqs,), kv_len, dtype=torch.int32, device="cuda")
    q = _random(num_tokens, case.num_heads, RANK + ROPE)
    if case.kernel == "latent_decode_attention":
        return lambda: latent_decode_attention.latent_decode_attention(q, cache, tables, kv_lens, RANK, SCALE)
    keys = cache.unsqueeze(2)
    return lambda: prefill_attention.prefill_attention(
        q, keys, keys[..., :RANK], tables, cu_q_lens, kv_lens, q_len, SCALE
    )


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")
