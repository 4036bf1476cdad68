"""CUDA graphs of the forward pass: a step is one launch, whatever the number of kernels.

A graph is captured for each shape of a ladder; a step runs in the smallest that holds it, padded with tokens and
sequences that belong to nobody. All graphs read their inputs from the same addresses, write their logits to the same
buffer and share one memory pool: only one runs at a time.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from limpet.backend.input_batch import StepInputs, StepShape

logger = logging.getLogger(__name__)

# Steps of more tokens keep the GPU busy for longer than it takes to launch their kernels one by one.
MIXED_TOKENS = (16, 32, 64, 96, 128, 160, 192, 224, *range(256, 513, 32), *range(576, 1025, 64))
MAX_PREFILLS = 32  # of one captured step


class Ladders(NamedTuple):
    """The shapes to capture, by rising number of tokens."""

    decodes: list[StepShape]
    mixed: list[StepShape]  # prefills among them


def ladders(max_rows: int, max_prefill_tokens: int, *, captures_prefills: bool) -> Ladders:
    """Few rows of padding for small steps, less than 7 % of them for large ones."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    rows = [size for size in sizes if size < max_rows] + [min(max_rows, sizes[-1])]
    decodes = [StepShape(size, size, 0) for size in rows]
    if not captures_prefills:
        return Ladders(decodes, [])
    below = bisect_left(MIXED_TOKENS, max_prefill_tokens + max_rows) + 1  # no step has more tokens
    mixed = [StepShape(count, min(count, max_rows), min(count // 2, MAX_PREFILLS)) for count in MIXED_TOKENS[:below]]
    return Ladders(decodes, mixed)


class StepGraphs:
    """Graphs of `forward`, which maps a step's inputs to the logits of its sampled tokens [num_sampled, vocab]."""

    def __init__(self, forward: Callable[[StepInputs], Tensor]) -> None:
        self._forward = forward
        self._ladders = Ladders([], [])
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self.num_bytes = 0  # of device memory

    def capture(self, ladders: Ladders, padding: Callable[[StepShape], StepInputs]) -> None:
        """Capture a graph for each shape; `padding(shape)` is such a step without any sequence."""
        started, free_before = time.monotonic(), torch.cuda.mem_get_info()[0]
        pool = torch.cuda.graph_pool_handle()
        shapes = [*reversed(ladders.mixed), *reversed(ladders.decodes)]  # largest first: others fit into its memory
        widest = max(shapes, key=lambda shape: shape.num_decodes)
        self._logits = self._forward(padding(widest)).clone()
        for number, shape in enumerate(shapes, start=1):
            inputs = padding(shape)
            self._forward(inputs)  # compiles the kernels, which a capture must not
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # NCCL has threads of its own
                self._logits[: shape.num_decodes].copy_(self._forward(inputs))
            self._graphs[shape] = graph
            logger.info(
                "CUDA graph %d of %d: %d tokens, %d of prefills at most",
                number,
                len(shapes),
                shape.num_tokens,
                shape.num_tokens if shape.num_prefills else 0,
            )
        self._ladders = ladders
        self.num_bytes = free_before - torch.cuda.mem_get_info()[0]
        logger.info("CUDA graphs took %.1f s and %.2f GiB", time.monotonic() - started, self.num_bytes / (1 << 30))

    def shape_for(self, num_tokens: int, num_decodes: int, num_prefills: int) -> StepShape | None:
        """The smallest captured shape that holds such a step; None if there is none."""
        ladder = self._ladders.mixed if num_prefills else self._ladders.decodes
        place = bisect_left(ladder, num_tokens, key=lambda shape: shape.num_tokens)
        shape = ladder[place] if place < len(ladder) else None
        return shape if shape and num_decodes <= shape.num_decodes and num_prefills <= shape.num_prefills else None

    def replay(self, shape: StepShape) -> Tensor:
        """Run the graph of that shape on what its inputs hold now; the next replay overwrites the logits."""
        self._graphs[shape].replay()
        return self._logits
