"""Strict loading: every parameter is filled exactly once, or loading fails and says which are missing or left over."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from limpet.backend.checkpoint import CheckpointDir, CheckpointError
from limpet.backend.device_reader import DTYPES, DeviceReader


def load_weights(model: nn.Module, checkpoint: CheckpointDir) -> int:
    """Copy the checkpoint into the model's parameters, cast to their dtype; returns the bytes of the parameters.

    Raises CheckpointError naming tensors that are missing, left over, of another shape, or not finite in the target
    dtype.
    """
    parameters = dict(model.named_parameters())  # a tied weight is listed once
    unfilled = set(parameters)
    linked = checkpoint.manifest().linked
    device = next(iter(parameters.values())).device
    with ExitStack() as stack:
        fill = _fill_from_map
        if device.type == "cuda":
            fill = stack.enter_context(DeviceReader(device)).fill
        for path in checkpoint.weight_files():
            _load_file(path, linked.get(path.name), parameters, unfilled, fill)
    if unfilled:
        raise CheckpointError(f"The checkpoint lacks {_some(unfilled)}: convert the model again.")
    return _num_bytes(parameters)


def fill_with_noise(model: nn.Module) -> int:
    """Random weights (normal, standard deviation 0.02, norms 1) instead of a checkpoint's; returns their bytes."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if name.endswith("norm.weight"):
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.02)
    return _num_bytes(parameters)


def _num_bytes(parameters: dict[str, nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())


def _load_file(
    path: Path,
    linked: dict[str, str] | None,
    parameters: dict[str, nn.Parameter],
    unfilled: set[str],
    fill: Callable[[Path, Mapping[str, Tensor]], None],
) -> None:
    """Take every tensor of the file, or those that `linked` lists with the weights they are."""
    wanted: dict[str, Tensor] = {}
    cast: list[str] = []
    try:
        with safe_open(path, framework="pt") as file:
            for stored, name in (linked or {key: key for key in file.keys()}).items():  # noqa: SIM118 - no dict
                if name not in unfilled:
                    reason = "is there twice" if name in parameters else "belongs to no parameter of the model"
                    raise CheckpointError(f"Tensor {name} of {path.name} {reason}: convert the model again.")
                entry = file.get_slice(stored)
                _check_shape(name, parameters[name], entry.get_shape())
                wanted[stored] = parameters[name].data
                if DTYPES.get(entry.get_dtype()) != parameters[name].dtype:
                    cast.append(name)
                unfilled.remove(name)
        fill(path, wanted)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path.name} cannot be read ({error}): convert the model again.") from None
    for name in cast:
        _check_finite(name, parameters[name])


def _fill_from_map(path: Path, wanted: Mapping[str, Tensor]) -> None:
    with safe_open(path, framework="pt") as file:
        for stored, target in wanted.items():
            target.copy_(file.get_tensor(stored))


def _check_shape(name: str, parameter: nn.Parameter, shape: list[int]) -> None:
    if list(parameter.shape) != shape:
        raise CheckpointError(
            f"Tensor {name} has shape {shape}, the model needs {list(parameter.shape)}: convert again."
        )


def _check_finite(name: str, parameter: nn.Parameter) -> None:
    if not bool(torch.isfinite(parameter).all()):
        raise CheckpointError(
            f"Tensor {name} does not fit into {str(parameter.dtype).removeprefix('torch.')} (it becomes infinite): "
            f"serve the model as bfloat16 or float32."
        )


def _some(names: set[str], shown: int = 5) -> str:
    listed = ", ".join(sorted(names)[:shown])
    return listed if len(names) <= shown else f"{listed} and {len(names) - shown} more"
