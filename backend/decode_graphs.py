"""CUDA graphs of the forward pass: a step of decodes is one launch, whatever the number of kernels.

A graph is captured for each batch size of a ladder; a step runs in the smallest that holds it, padded with rows that
belong to nobody. All graphs read their inputs from the same addresses and share one memory pool: only one runs at a
time.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from limpet.backend.input_batch import StepInputs

logger = logging.getLogger(__name__)


def graph_sizes(max_rows: int) -> list[int]:
    """Batch sizes to capture, rising: few rows of padding for small steps, less than 7 % of them for large ones."""
    ladder = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, 513, 32)]
    return [size for size in ladder if size < max_rows] + [min(max_rows, ladder[-1])]


class DecodeGraphs:
    """Graphs of `forward`, which maps the inputs of n decodes to their logits [n, vocab]."""

    def __init__(self, forward: Callable[[StepInputs], Tensor]) -> None:
        self._forward = forward
        self._sizes: list[int] = []
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @property
    def sizes(self) -> list[int]:
        """The captured batch sizes, rising."""
        return self._sizes

    def capture(self, sizes: list[int], padding: Callable[[int], StepInputs]) -> None:
        """Capture a graph for each size; `padding(size)` is a step of that many padding rows."""
        started, free_before = time.monotonic(), torch.cuda.mem_get_info()[0]
        pool = torch.cuda.graph_pool_handle()
        for number, size in enumerate(reversed(sizes), start=1):  # the largest first: the others fit into its memory
            inputs = padding(size)
            self._forward(inputs)  # compiles the kernels, which a capture must not
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._forward(inputs)
            self._graphs[size] = graph, logits
            logger.info("CUDA graph %d of %d: %d rows", number, len(sizes), size)
        self._sizes = sizes
        gib = (free_before - torch.cuda.mem_get_info()[0]) / (1 << 30)
        logger.info("CUDA graphs took %.1f s and %.2f GiB", time.monotonic() - started, gib)

    def size_for(self, num_rows: int) -> int:
        """The size of the graph for so many decodes, 0 if there is none."""
        place = bisect_left(self._sizes, num_rows)
        return self._sizes[place] if place < len(self._sizes) else 0

    def replay(self, size: int) -> Tensor:
        """Run the graph of that size on what its inputs hold now; the next replay overwrites the logits."""
        graph, logits = self._graphs[size]
        graph.replay()
        return logits
