"""Which tiles run a mixture of experts quickest on this GPU, for 1 to 4096 tokens of DeepSeek-V2-Lite and DeepSeek-V2.

Both halves share their blocks of rows and are otherwise independent: for each size of blocks each half's candidates are
timed alone, and the size whose best halves are quickest together is kept.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench_cudagraph

from limpet.backend.checkpoint import ExpertsConfig
from limpet.benchmarks.model_shapes import SHAPES
from limpet.kernels.expert_blocks import lay_out
from limpet.kernels.expert_routing import Routing, route
from limpet.kernels.grouped_matmul import Tile, gate_and_up, weighted_down
from limpet.kernels.mix_experts import MAX_TUNED_TOKENS, tile_key

MODELS = ("deepseek-v2-lite",)
TOKENS = [1 << power for power in range(MAX_TUNED_TOKENS.bit_length())]
# Of each size of blocks: outputs, inputs, warps, stages.
GATE_UP: dict[int, list[Tile]] = {
    16: [
        Tile(16, 256, 4, 4),
        Tile(32, 128, 4, 4),
        Tile(32, 128, 4, 5),
        Tile(32, 256, 4, 3),
        Tile(64, 64, 4, 5),
        Tile(64, 128, 4, 3),
        Tile(64, 128, 4, 4),
    ],
    32: [Tile(32, 128, 4, 4), Tile(64, 64, 4, 4), Tile(64, 128, 4, 3), Tile(64, 128, 8, 4), Tile(128, 64, 8, 4)],
    64: [Tile(64, 64, 4, 4), Tile(64, 128, 4, 3), Tile(128, 64, 4, 3), Tile(128, 64, 8, 4), Tile(128, 64, 4, 4)],
    128: [Tile(64, 64, 4, 4), Tile(64, 64, 8, 4), Tile(128, 64, 8, 3), Tile(128, 64, 8, 4)],
}
DOWN: dict[int, list[Tile]] = {
    16: [
        Tile(16, 256, 4, 4),
        Tile(32, 128, 4, 5),
        Tile(32, 256, 4, 3),
        Tile(64, 64, 4, 5),
        Tile(64, 128, 4, 3),
        Tile(64, 128, 4, 4),
        Tile(128, 64, 4, 4),
    ],
    32: [Tile(64, 64, 4, 5), Tile(64, 128, 4, 4), Tile(128, 64, 4, 4), Tile(128, 128, 4, 3), Tile(128, 64, 8, 5)],
    64: [Tile(64, 64, 4, 4), Tile(128, 64, 4, 4), Tile(128, 128, 8, 3), Tile(256, 64, 8, 3)],
    128: [Tile(128, 64, 4, 4), Tile(128, 64, 8, 3), Tile(128, 64, 8, 4), Tile(256, 64, 8, 3)],
}


@dataclass(frozen=True)
class Load:
    """Some tokens on random experts of a model's shape."""

    gate_up: Tensor
    down: Tensor
    x: Tensor
    hidden: Tensor  # what the first half leaves
    routing: Routing

    def time_us(self, block_rows: int, tile: Tile, half: str) -> float:
        """Infinite if the candidate needs more than the GPU has."""
        blocks, num_choices = lay_out(self.routing, block_rows), self.routing.ids.shape[1]

        def run() -> Tensor:
            if half == "gate_up":
                return gate_and_up(self.x, self.gate_up, blocks, num_choices, tile)
            return weighted_down(self.hidden, self.down, self.routing.weights, blocks, tile)

        return _time_us(run)


def tune_experts(processes: ProcessPoolExecutor) -> dict[str, list[int]]:
    """The entries of the table `mix_experts`: rows of a block, then the tiles of both halves."""
    list(processes.map(_compile, *zip(*_candidates(), strict=True)))
    table: dict[str, list[int]] = {}
    for name in MODELS:
        config = SHAPES[name]
        assert config.experts is not None
        weights = _weights(config.experts, config.hidden_size)
        for num_tokens in TOKENS:
            load = _load(config.experts, config.hidden_size, num_tokens, *weights)
            key = tile_key(num_tokens, load.routing.ids.shape[1], *_sizes(load), 2)
            table[key] = _best(load, key)
    return table


def _best(load: Load, key: str) -> list[int]:
    found: dict[int, tuple[float, list[int]]] = {}
    for block_rows in _useful_block_rows(load):
        total, numbers = 0.0, [block_rows]
        for half, tiles in (("gate_up", GATE_UP[block_rows]), ("down", DOWN[block_rows])):
            times = {tile: load.time_us(block_rows, tile, half) for tile in tiles}
            best = min(tiles, key=lambda tile: times[tile])
            total += times[best]
            numbers += best
        found[block_rows] = total, numbers
    shown = ", ".join(f"blocks of {rows}: {time:.1f} us" for rows, (time, _) in found.items())
    time, numbers = min(found.values())
    rate = (load.gate_up.nbytes + load.down.nbytes) / time * 1e-3
    print(f"{key}: {shown}; {numbers}, {rate:.0f} GB/s of all experts", flush=True)
    return numbers


def _useful_block_rows(load: Load) -> list[int]:
    """Blocks of about the rows that an expert has on average."""
    average = load.routing.ids.numel() / load.gate_up.shape[0]
    return [rows for rows in GATE_UP if min(128, average / 4) <= rows <= max(16, 3 * average)]


def _candidates() -> Iterator[tuple[str, str, int, Tile]]:
    for name in MODELS:
        for half, tiles in (("gate_up", GATE_UP), ("down", DOWN)):
            for block_rows, each in tiles.items():
                yield from ((name, half, block_rows, tile) for tile in each)


def _compile(name: str, half: str, block_rows: int, tile: Tile) -> None:
    """Compile into Triton's cache on disk; what the GPU cannot run is skipped when timed."""
    config = SHAPES[name]
    assert config.experts is not None
    few = ExpertsConfig(
        num_experts=config.experts.num_experts_per_token,
        num_shared_experts=config.experts.num_shared_experts,
        num_experts_per_token=config.experts.num_experts_per_token,
        intermediate_size=config.experts.intermediate_size,
        num_dense_layers=0,
    )
    load = _load(few, config.hidden_size, 2, *_weights(few, config.hidden_size))
    blocks = lay_out(load.routing, block_rows)
    try:
        if half == "gate_up":
            gate_and_up(load.x, load.gate_up, blocks, load.routing.ids.shape[1], tile)
        else:
            weighted_down(load.hidden, load.down, load.routing.weights, blocks, tile)
    except OutOfResources:
        return


def _weights(experts: ExpertsConfig, hidden: int) -> tuple[Tensor, Tensor]:
    num_all, size = experts.num_experts + experts.num_shared_experts, experts.intermediate_size
    shapes = (num_all, 2 * size, hidden), (num_all, hidden, size)
    gate_up, down = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    return gate_up, down


def _load(experts: ExpertsConfig, hidden: int, num_tokens: int, gate_up: Tensor, down: Tensor) -> Load:
    x = torch.randn(num_tokens, hidden, dtype=torch.bfloat16, device="cuda")
    router = torch.randn(experts.num_experts, hidden, dtype=torch.bfloat16, device="cuda") * hidden**-0.5
    routing = route(x, router, experts.num_experts_per_token, experts.num_shared_experts, 1, 1, 1.0, False)
    rows = torch.randn(routing.ids.numel(), experts.intermediate_size, dtype=torch.bfloat16, device="cuda")
    return Load(gate_up, down, x, rows, routing)


def _sizes(load: Load) -> tuple[int, int, int]:
    num_all, hidden, intermediate = load.down.shape
    return num_all, intermediate, hidden


def _time_us(run: Callable[[], Tensor]) -> float:
    try:
        return 1e3 * float(do_bench_cudagraph(run, rep=5, return_mode="median"))
    except OutOfResources:
        return float("inf")
