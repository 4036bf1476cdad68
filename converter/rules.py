"""Declarative rules from source tensors to target weights, and their strict check before a byte is written.

A layout is a list of rules. Each rule makes one target out of parts: read every part, reorder its rows where
the source stores them differently, concatenate. `{i}` in a name stands for the layer. A rule of which the model's
configuration has no target (a bias, an untied head) is idle. A target of three dimensions is a stack of matrices, and
its rows are theirs, one matrix after the other.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from limpet.backend.checkpoint import DType, ModelConfig
from limpet.converter.errors import ConversionError
from limpet.converter.targets import Shape, target_shapes

# The types that weights may have, with the type on disk that keeps them.
WEIGHT_DTYPES: dict[torch.dtype, DType] = {
    torch.float64: "float32",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
RowCount = Callable[[ModelConfig], int]
Reorder = Callable[[torch.Tensor, ModelConfig], torch.Tensor]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the source as its header describes it."""

    shape: Shape
    dtype: torch.dtype


def main_dtype(tensors: Mapping[str, TensorInfo]) -> DType:
    """The type on disk of most of these weights; raises ConversionError if there are none."""
    sizes: Counter[torch.dtype] = Counter()
    for info in tensors.values():
        sizes[info.dtype] += math.prod(info.shape)
    if not sizes:
        raise ConversionError("The checkpoint holds no tensors.")
    return WEIGHT_DTYPES.get(sizes.most_common(1)[0][0], "float32")


@dataclass(frozen=True)
class Part:
    """Rows of a target: `rows` says how many (None: all of them), `reorder` undoes the source's own order.

    Where the source's tensor holds other things too, or lies otherwise, `shape` says what it is and `reorder` takes the
    rows out of it.
    """

    source: str
    rows: RowCount | None = None
    reorder: Reorder | None = None
    shape: Callable[[ModelConfig], Shape] | None = None


@dataclass(frozen=True)
class Rule:
    target: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Layout:
    """How one kind of source names and orders its tensors; `ignored` are patterns of tensors without weights."""

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One target weight to write, with the source tensors it is made of."""

    target: str
    shape: Shape
    parts: tuple[Part, ...]


def rename(target: str, source: str, reorder: Reorder | None = None) -> Rule:
    return Rule(target, (Part(source, reorder=reorder),))


def fuse(target: str, *parts: Part) -> Rule:
    return Rule(target, parts)


def require_enough_tensors(config: ModelConfig, available: Mapping[str, TensorInfo]) -> None:
    """Raise ConversionError for more layers or experts than there are tensors, before rules are made for each."""
    experts, needed, each = config.experts, config.num_layers, ""
    if experts is not None:
        num_sparse = max(config.num_layers - experts.num_dense_layers, 1)
        needed += num_sparse * experts.num_experts + experts.num_shared_experts
        each = f" with {experts.num_experts} experts and {experts.num_shared_experts} shared ones"
    if needed > len(available):
        raise ConversionError(
            f"The configuration has {config.num_layers} layers{each}, the checkpoint {len(available)} tensors."
        )


def plan_steps(layout: Layout, config: ModelConfig, available: Mapping[str, TensorInfo]) -> list[Step]:
    """Every target weight with its sources, in writing order.

    Raises ConversionError when a tensor is missing, left over or has a shape the configuration does not imply.
    """
    shapes = target_shapes(config)
    rules = _expand(layout, config.num_layers)
    steps = [Step(target, shape, rules[target].parts) for target, shape in shapes.items()]
    needed = {part.source for step in steps for part in step.parts}
    missing = [name for name in dict.fromkeys(p.source for s in steps for p in s.parts) if name not in available]
    unused = [n for n in available if n not in needed and not any(re.fullmatch(p, n) for p in layout.ignored)]
    _require_complete(missing, unused, config)
    for step in steps:
        _require_described(step, config, available)
    return steps


def _expand(layout: Layout, num_layers: int) -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for rule in layout.rules:
        for layer in range(num_layers) if "{i}" in rule.target else (0,):
            parts = (replace(part, source=part.source.format(i=layer)) for part in rule.parts)
            rules[rule.target.format(i=layer)] = Rule(rule.target.format(i=layer), tuple(parts))
    return rules


def _require_complete(missing: list[str], unused: list[str], config: ModelConfig) -> None:
    faults = []
    if missing:
        faults.append(f"lacks {_listing(missing)}")
    if unused:
        faults.append(f"has {_listing(unused)}, which a {config.source_architecture} of this configuration lacks")
    if faults:
        raise ConversionError(f"The checkpoint {' and '.join(faults)}.")


def _listing(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"the tensor{'s' if len(names) > 1 else ''} {', '.join(names[:3])}{rest}"


def _described_shape(part: Part, target: Shape, config: ModelConfig) -> Shape:
    if part.shape is not None:
        return part.shape(config)
    rows = target[0] if part.rows is None else part.rows(config)
    return (rows, *target[-1:]) if len(target) > 1 else (rows,)


def _require_described(step: Step, config: ModelConfig, available: Mapping[str, TensorInfo]) -> None:
    for part in step.parts:
        expected, found = _described_shape(part, step.shape, config), available[part.source]
        if found.shape != expected:
            raise ConversionError(
                f"Tensor {part.source} has shape {list(found.shape)}, the configuration implies {list(expected)}."
            )
        if found.dtype not in WEIGHT_DTYPES:
            kind = str(found.dtype).removeprefix("torch.")
            raise ConversionError(f"Tensor {part.source} has type {kind}: quantised weights cannot be converted.")
