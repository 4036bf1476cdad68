"""What a model takes on each of several GPUs, and how long its decode steps should take, without any GPU.

    python -m benchmarks.memory_plan --model deepseek-v2 --tp 4 8
    python -m benchmarks.memory_plan --tp 8 --measured-tp 2 --measured-layers 26 --measured 1=9.1 16=14.2

Every rank's part is built of meta tensors by the engine's own code and added up by the loader's. A step is predicted as
the bytes that a rank reads over --rate, and a cost per layer that is what a measured run took beyond that.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from limpet.backend.checkpoint import ModelConfig
from limpet.backend.layers.weight import Weight
from limpet.backend.models.causal_lm import CausalLM
from limpet.backend.models.registry import build_model
from limpet.backend.ranks.degrees import check_degree
from limpet.backend.ranks.group import RankGroup
from limpet.backend.weights import num_bytes
from limpet.benchmarks.model_shapes import SHAPES

GIB = 1 << 30
GPU_GIB = 139.8  # of an H200, as torch sees it
RATE_GB_S = 4200.0  # of a large copy, read and written
TAKEN_GIB = 12.0  # of it for the largest step, CUDA graphs and CUDA itself
DTYPE = torch.bfloat16

SESSION_LEN = 4096
KV_LEN = 256  # of each sequence, as in the middle of the decode workload


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of a model, of meta tensors."""

    config: ModelConfig
    model: CausalLM

    @classmethod
    def of(cls, config: ModelConfig, rank: int, tp: int) -> "RankPlan":
        return cls(config, build_model(config, SESSION_LEN, torch.device("meta"), DTYPE, RankGroup(rank, tp)))

    @property
    def weight_bytes(self) -> int:
        return num_bytes(self.model)

    @property
    def token_bytes(self) -> int:
        """Of the cache, in all layers."""
        return self.model.cache_layout.block_bytes(1, DTYPE)

    def step_bytes(self, batch: int) -> float:
        """Of weights and cache that a decode step reads; of routed experts those that are touched on average."""
        total = float(batch * KV_LEN * self.token_bytes)
        for name, weight in self.model.named_parameters():
            assert isinstance(weight, Weight)
            is_table = name == "embed_tokens.weight" and not self.config.tie_word_embeddings
            total += 0 if is_table else weight.nbytes * self._read_share(name, weight, batch)
        return total

    def _read_share(self, name: str, weight: Weight, batch: int) -> float:
        experts = self.config.experts
        if experts is None or ".experts_" not in name:
            return 1.0
        routed = len(weight.parts[0][0]) / weight.shape[0]
        untouched = (1 - experts.num_experts_per_token / experts.num_experts) ** batch
        return 1 - routed * untouched


@dataclass(frozen=True)
class MeasuredRun:
    """Decode steps by batch, in milliseconds; `added_us` is what a layer costs the predicted model beyond its own."""

    plan: RankPlan
    label: str
    steps_ms: Mapping[int, float]
    added_us: float = 0.0


def main() -> None:
    arguments = _arguments()
    console = Console(width=120)
    print(f"{arguments.model}, {arguments.gpu_gib:g} GiB a GPU, {arguments.taken_gib:g} for steps, graphs and CUDA")
    console.print(memory_table(arguments.model, arguments.tp, arguments.gpu_gib, arguments.taken_gib))
    if arguments.measured:
        console.print(step_table(arguments.model, arguments.tp, _measured(arguments), arguments.rate))


def memory_table(model: str, degrees: Sequence[int], gpu_gib: float = GPU_GIB, taken_gib: float = TAKEN_GIB) -> Table:
    """A row for each number of GPUs."""
    columns = ("GPUs", "weights, GiB a GPU", "of the whole", "cache, KiB a token", "cache, GiB", "tokens of cache")
    table = Table(*columns, f"sequences of {SESSION_LEN}", box=MARKDOWN)
    config = SHAPES[model]
    whole = RankPlan.of(config, 0, 1).weight_bytes
    for tp in degrees:
        check_degree(config, tp)
        plans = [RankPlan.of(config, rank, tp) for rank in range(tp)]
        largest = max(plan.weight_bytes for plan in plans)
        room = (gpu_gib - taken_gib) * GIB - largest
        tokens = int(room / plans[0].token_bytes)
        cache = (f"{room / GIB:.1f}", f"{tokens:,}", f"{tokens // SESSION_LEN:,}") if room > 0 else ("none", "", "")
        table.add_row(
            str(tp),
            f"{largest / GIB:.2f}",
            f"1/{whole / largest:.2f}",
            f"{plans[0].token_bytes / 1024:.1f}",
            *cache,
        )
    return table


def step_table(
    model: str,
    degrees: Sequence[int],
    run: MeasuredRun,
    rate_gb_s: float = RATE_GB_S,
    found: Mapping[int, Mapping[int, float]] | None = None,
) -> Table:
    """Predicted decode steps, a row for each batch of the measured run; beside them what a degree in `found` took."""
    config, rate = SHAPES[model], rate_gb_s * 1e9
    table = Table(
        "batch",
        f"measured: {run.label}, ms",
        "of it reading",
        "else, µs a layer",
        *(f"{config.num_layers} layers on {tp} GPUs, ms" for tp in degrees),
        *(f"measured on {tp}, ms" for tp in found or {}),
        box=MARKDOWN,
    )
    plans = [RankPlan.of(config, 0, tp) for tp in degrees]
    for batch, ms in sorted(run.steps_ms.items()):
        reading = run.plan.step_bytes(batch) / rate
        per_layer = (ms / 1e3 - reading) / run.plan.config.num_layers
        each = per_layer + run.added_us / 1e6
        predicted = [plan.step_bytes(batch) / rate + each * config.num_layers for plan in plans]
        shown = [f"{1e3 * seconds:.1f}" for seconds in predicted]
        measured = [f"{steps[batch]:.1f}" if batch in steps else "" for steps in (found or {}).values()]
        table.add_row(str(batch), f"{ms:.2f}", f"{1e3 * reading:.2f}", f"{1e6 * per_layer:.0f}", *shown, *measured)
    return table


def _measured(arguments: argparse.Namespace) -> MeasuredRun:
    config = SHAPES[arguments.measured_model or arguments.model]
    if arguments.measured_layers is not None:
        config = msgspec.structs.replace(config, num_layers=arguments.measured_layers)
    steps_ms = {int(batch): float(ms) for batch, ms in (each.split("=") for each in arguments.measured)}
    label = f"{config.num_layers} layers on {arguments.measured_tp}"
    return MeasuredRun(RankPlan.of(config, 0, arguments.measured_tp), label, steps_ms, arguments.added_us)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="deepseek-v2")
    parser.add_argument("--tp", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--gpu-gib", type=float, default=GPU_GIB, help="memory of a GPU that torch sees")
    parser.add_argument(
        "--taken-gib", type=float, default=TAKEN_GIB, help="of it for the largest step, graphs and CUDA"
    )
    parser.add_argument("--rate", type=float, default=RATE_GB_S, help="GB/s that a large copy reads and writes")
    parser.add_argument("--measured", nargs="*", metavar="BATCH=MS", help="decode steps of a run")
    parser.add_argument("--measured-model", choices=SHAPES, help="another model than --model")
    parser.add_argument("--measured-tp", type=int, default=2)
    parser.add_argument("--measured-layers", type=int)
    parser.add_argument("--added-us", type=float, default=0.0, help="of a layer, on top of what the run shows")
    return parser.parse_args()


if __name__ == "__main__":
    main()
