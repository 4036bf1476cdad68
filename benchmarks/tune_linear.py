"""Which tiles make our product of few rows quicker than cuBLAS on this GPU, for the weights of well-known models.

A candidate is timed as a CUDA graph that goes through so many weights that none of them stays in the L2 cache.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from limpet.backend.checkpoint import ModelConfig
from limpet.benchmarks.model_shapes import SHAPES
from limpet.kernels.linear import ROW_CLASSES, Tile, few_rows_key, launch

MODELS = ("llama-2-7b", "llama-2-13b", "llama-3-8b", "deepseek-v2-lite")
RING_BYTES = 300_000_000
TILES = [  # block_outs, block_ins, warps, stages
    (16, 256, 4, 5),
    (16, 512, 4, 3),
    (32, 128, 4, 5),
    (32, 256, 4, 3),
    (32, 256, 4, 4),
    (64, 64, 4, 6),
    (64, 128, 4, 3),
    (64, 128, 4, 4),
    (64, 256, 8, 3),
    (128, 64, 4, 4),
    (128, 128, 8, 3),
]
SEGMENTS = (1, 2, 3, 4, 6, 8, 12)
MIN_SEGMENT = 512
PROGRAMS = (100, 2200)  # fewer leave the GPU idle, more only add merging
MARGIN = 0.98  # of cuBLAS's time: what is closer is not worth an entry


@dataclass(frozen=True)
class Candidate:
    """A tile and the length of a segment."""

    tile: Tile
    segment_len: int


def tune_linear(processes: ProcessPoolExecutor) -> dict[str, list[int]]:
    """The entries of the table `linear`: where ours is quicker, the tile and the segment's length."""
    todo = [(rows, tile, split) for rows in ROW_CLASSES for tile in TILES for split in (False, True)]
    list(processes.map(_compile, *zip(*todo, strict=True)))
    table: dict[str, list[int]] = {}
    for num_outs, num_ins in _weight_shapes():
        weights = torch.randn(1 + RING_BYTES // (2 * num_outs * num_ins), num_outs, num_ins, device="cuda").bfloat16()
        for rows in ROW_CLASSES:
            x = torch.randn(rows, num_ins, dtype=torch.bfloat16, device="cuda")
            cublas_us = _time_us(partial(F.linear, x), weights)
            times = {each: _candidate_us(each, x, weights) for each in _candidates(rows, num_outs, num_ins)}
            best = min(times, key=lambda each: times[each])
            rate = 2e-3 * num_outs * num_ins / times[best]
            print(
                f"{num_outs:6} x {num_ins:5}, {rows:2} rows: cuBLAS {cublas_us:6.1f} us, ours {times[best]:6.1f} us "
                f"({rate:4.0f} GB/s) {tuple(best.tile)} segments of {best.segment_len}",
                flush=True,
            )
            if times[best] < MARGIN * cublas_us:
                table[few_rows_key(rows, num_outs, num_ins)] = [*best.tile, best.segment_len]
        del weights
    return table


def _weight_shapes() -> list[tuple[int, int]]:
    return sorted({shape for name in MODELS for shape in _shapes_of(SHAPES[name])})


def _shapes_of(config: ModelConfig) -> Iterator[tuple[int, int]]:
    hidden, heads, latent = config.hidden_size, config.num_heads * config.head_dim, config.latent_attention
    if latent is None:
        yield heads + 2 * config.num_kv_heads * config.head_dim, hidden
        yield hidden, heads
    else:
        yield (latent.q_lora_rank or heads) + latent.row_dim, hidden
        yield hidden, config.num_heads * latent.v_head_dim
    yield 2 * config.intermediate_size, hidden
    yield hidden, config.intermediate_size
    yield config.vocab_size, hidden


def _candidates(rows: int, num_outs: int, num_ins: int) -> Iterator[Candidate]:
    for block_outs, block_ins, warps, stages in TILES:
        for segments in SEGMENTS:
            length = -(-num_ins // segments // block_ins) * block_ins
            programs = -(-num_outs // block_outs) * segments
            if (segments == 1 or length >= MIN_SEGMENT) and PROGRAMS[0] <= programs <= max(PROGRAMS[1], num_outs // 16):
                yield Candidate(Tile(max(rows, 16), block_outs, block_ins, warps, stages), length)


def _compile(rows: int, tile: tuple[int, int, int, int], is_split: bool) -> None:
    """Compile into Triton's cache on disk."""
    x, weight = torch.zeros(rows, 4096, device="cuda").bfloat16(), torch.zeros(4096, 4096, device="cuda").bfloat16()
    try:
        launch(x, weight, None, Tile(max(rows, 16), *tile), 2048 if is_split else 4096, is_split=is_split)
    except OutOfResources:
        return


def _candidate_us(candidate: Candidate, x: Tensor, weights: Tensor) -> float:
    """Infinite if the candidate needs more than the GPU has."""
    split = candidate.segment_len < x.shape[1]
    try:
        return _time_us(
            lambda weight: launch(x, weight, None, candidate.tile, candidate.segment_len, is_split=split), weights
        )
    except OutOfResources:
        return float("inf")


def _time_us(product: Callable[[Tensor], Tensor], weights: Tensor) -> float:
    product(weights[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            product(weight)
    times: list[float] = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(weights))
    return median(times[1:])
