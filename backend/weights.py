"""Strict loading: every parameter is filled exactly once, or loading fails and says which are missing or left over."""

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from limpet.backend.checkpoint import CheckpointDir, CheckpointError
from limpet.backend.device_reader import DTYPES, DeviceReader, Wanted
from limpet.backend.layers.weight import Weight

Weights: TypeAlias = Mapping[str, Sequence[Weight]]  # by the checkpoint's names; parts of one tensor may be several's


def load_weights(model: nn.Module, checkpoint: CheckpointDir) -> int:
    """Copy the checkpoint into the model's parameters, cast to their dtype; returns the bytes of the parameters.

    Nothing is read but what the parameters hold. Raises CheckpointError naming tensors that are missing, left over, of
    another shape, or not finite in the target dtype.
    """
    weights = _weights(model)
    unfilled = set(weights)
    linked = checkpoint.manifest().linked
    device = next(iter(weights.values()))[0].device
    with ExitStack() as stack:
        fill = _fill_from_map
        if device.type == "cuda":
            fill = stack.enter_context(DeviceReader(device)).fill
        for path in checkpoint.weight_files():
            _load_file(path, linked.get(path.name), weights, unfilled, fill)
    if unfilled:
        raise CheckpointError(f"The checkpoint lacks {_some(unfilled)}: convert the model again.")
    return num_bytes(model)


def fill_with_noise(model: nn.Module, rank: int = 0) -> int:
    """Random weights (normal, standard deviation 0.02, norms 1) instead of a checkpoint's; returns their bytes.

    What all ranks hold is the same on all of them.
    """
    weights = _weights(model)
    for name, each in weights.items():
        for weight in each:
            if name.endswith("norm.weight"):
                weight.data.fill_(1.0)
            else:
                seed = zlib.crc32(name.encode()) + (0 if weight.is_whole else rank << 32)
                weight.data.normal_(0.0, 0.02, generator=torch.Generator(weight.device).manual_seed(seed))
    return num_bytes(model)


def _weights(model: nn.Module) -> Weights:
    weights: defaultdict[str, list[Weight]] = defaultdict(list)
    for name, parameter in model.named_parameters():  # a tied weight is listed once
        assert isinstance(parameter, Weight)
        module, _, own_name = name.rpartition(".")
        weights[f"{module}.{parameter.stored_as or own_name}".removeprefix(".")].append(parameter)
    return weights


def num_bytes(model: nn.Module) -> int:
    """Of the parameters that this rank holds; on the meta device too."""
    return sum(weight.nbytes for each in _weights(model).values() for weight in each)


def _load_file(
    path: Path,
    linked: dict[str, str] | None,
    weights: Weights,
    unfilled: set[str],
    fill: Callable[[Path, Sequence[Wanted]], None],
) -> None:
    """Take every tensor of the file, or those that `linked` lists with the weights they are."""
    wanted: list[Wanted] = []
    cast: list[str] = []
    try:
        with safe_open(path, framework="pt") as file:
            for stored, name in (linked or {key: key for key in file.keys()}).items():  # noqa: SIM118 - no dict
                if name not in unfilled:
                    reason = "is there twice" if name in weights else "belongs to no parameter of the model"
                    raise CheckpointError(f"Tensor {name} of {path.name} {reason}: convert the model again.")
                entry = file.get_slice(stored)
                for weight in weights[name]:
                    _check_shape(name, weight, entry.get_shape())
                    if weight.is_padded:
                        weight.data.zero_()
                    wanted += [Wanted(stored, piece.source, piece.target) for piece in weight.pieces()]
                if DTYPES.get(entry.get_dtype()) != weights[name][0].dtype:
                    cast.append(name)
                unfilled.remove(name)
        fill(path, wanted)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path.name} cannot be read ({error}): convert the model again.") from None
    for name in cast:
        for weight in weights[name]:
            _check_finite(name, weight)


def _fill_from_map(path: Path, wanted: Sequence[Wanted]) -> None:
    with safe_open(path, framework="pt") as file:
        for stored, source, target in wanted:
            target.copy_(file.get_slice(stored)[source])


def _check_shape(name: str, weight: Weight, shape: list[int]) -> None:
    if list(weight.whole_shape) != shape:
        raise CheckpointError(
            f"Tensor {name} has shape {shape}, the model needs {list(weight.whole_shape)}: convert again."
        )


def _check_finite(name: str, weight: Weight) -> None:
    if not bool(torch.isfinite(weight).all()):
        raise CheckpointError(
            f"Tensor {name} does not fit into {str(weight.dtype).removeprefix('torch.')} (it becomes infinite): "
            f"serve the model as bfloat16 or float32."
        )


def _some(names: set[str], shown: int = 5) -> str:
    listed = ", ".join(sorted(names)[:shown])
    return listed if len(names) <= shown else f"{listed} and {len(names) - shown} more"
