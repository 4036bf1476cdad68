"""Strict loading: every parameter is filled exactly once, or loading fails and says which are missing or left over."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from limpet.backend.checkpoint import CheckpointDir, CheckpointError


def load_weights(model: nn.Module, checkpoint: CheckpointDir) -> int:
    """Copy the checkpoint into the model's parameters, cast to their dtype; returns the bytes of the parameters.

    Raises CheckpointError naming tensors that are missing, left over, of another shape, or not finite in the target
    dtype.
    """
    parameters = dict(model.named_parameters())  # a tied weight is listed once
    unfilled = set(parameters)
    linked = checkpoint.manifest().linked
    for path in checkpoint.weight_files():
        _load_file(path, linked.get(path.name), parameters, unfilled)
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
    path: Path, linked: dict[str, str] | None, parameters: dict[str, nn.Parameter], unfilled: set[str]
) -> None:
    """Take every tensor of the file, or those that `linked` lists with the weights they are."""
    try:
        with safe_open(path, framework="pt") as file:
            for stored, name in (linked or {key: key for key in file.keys()}).items():  # noqa: SIM118 - no dict
                if name not in unfilled:
                    reason = "is there twice" if name in parameters else "belongs to no parameter of the model"
                    raise CheckpointError(f"Tensor {name} of {path.name} {reason}: convert the model again.")
                _fill(name, parameters[name], file.get_tensor(stored))
                unfilled.remove(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path.name} cannot be read ({error}): convert the model again.") from None


def _fill(name: str, parameter: nn.Parameter, tensor: Tensor) -> None:
    if parameter.shape != tensor.shape:
        raise CheckpointError(
            f"Tensor {name} has shape {list(tensor.shape)}, the model needs {list(parameter.shape)}: convert again."
        )
    parameter.data.copy_(tensor)
    if parameter.dtype != tensor.dtype and not bool(torch.isfinite(parameter).all()):
        raise CheckpointError(
            f"Tensor {name} does not fit into {str(parameter.dtype).removeprefix('torch.')} (it becomes infinite): "
            f"serve the model as bfloat16 or float32."
        )


def _some(names: set[str], shown: int = 5) -> str:
    listed = ", ".join(sorted(names)[:shown])
    return listed if len(names) <= shown else f"{listed} and {len(names) - shown} more"
