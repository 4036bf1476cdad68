"""Writing the weights: sharded, one source tensor in memory at a time, checked for numbers that no model can use."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from pathlib import Path

import torch

from limpet.backend.checkpoint import FileEntry, ModelConfig
from limpet.converter.errors import ConversionError
from limpet.converter.rules import Step, TensorInfo
from limpet.converter.safetensors_file import SafetensorsWriter, encode_header
from limpet.converter.source import TensorStore

Progress = Callable[[int], None]  # called with the bytes just written
SHARD_BYTES = 4 << 30


def plan_shards(steps: Sequence[Step], dtype: torch.dtype) -> list[list[Step]]:
    """The steps in order, cut where a file would pass SHARD_BYTES; a larger tensor gets a file of its own."""
    shards: list[list[Step]] = [[]]
    size = 0
    for step in steps:
        step_bytes = prod(step.shape) * dtype.itemsize
        if shards[-1] and size + step_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(step)
        size += step_bytes
    return shards


def weight_bytes(shards: Sequence[Sequence[Step]], dtype: torch.dtype) -> int:
    """Bytes that the files of these shards take, headers included."""
    data = sum(prod(step.shape) * dtype.itemsize for shard in shards for step in shard)
    return data + sum(len(encode_header(_infos(shard, dtype))) for shard in shards)


def write_weights(
    folder: Path,
    shards: Sequence[Sequence[Step]],
    store: TensorStore,
    config: ModelConfig,
    progress: Progress,
) -> dict[str, FileEntry]:
    """Write every shard into the folder; returns size and checksum by file name.

    Raises ConversionError for a value that is not finite, or that the type on disk cannot hold.
    """
    dtype = torch_dtype(config)
    entries: dict[str, FileEntry] = {}
    for number, shard in enumerate(shards, start=1):
        name = shard_name(number, len(shards))
        with SafetensorsWriter(folder / name, _infos(shard, dtype)) as writer:
            for step in shard:
                writer.write(step.target, _reporting(read_parts(step, store, config), progress))
        entries[name] = writer.entry()
    return entries


def shard_name(number: int, num_shards: int) -> str:
    return f"weights-{number:05}-of-{num_shards:05}.safetensors"


def read_parts(step: Step, store: TensorStore, config: ModelConfig) -> Iterator[torch.Tensor]:
    """The target weight's rows in the type on disk, part by part."""
    for part in step.parts:
        source = store.read(part.source)
        tensor = source.to(torch_dtype(config))
        _require_finite(part.source, source, tensor)
        yield tensor if part.reorder is None else part.reorder(tensor, config)


def torch_dtype(config: ModelConfig) -> torch.dtype:
    dtype = getattr(torch, config.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _reporting(tensors: Iterable[torch.Tensor], progress: Progress) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        yield tensor
        progress(tensor.nbytes)


def _require_finite(name: str, source: torch.Tensor, tensor: torch.Tensor) -> None:
    if _is_finite(tensor):
        return
    if _is_finite(source):
        largest = float(source.abs().max())
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ConversionError(
            f"Tensor {name} has values up to {largest:.3g}, too large for {kind}: use --dtype float32."
        )
    raise ConversionError(f"Tensor {name} holds NaN or infinite values: the checkpoint is damaged.")


def _is_finite(tensor: torch.Tensor) -> bool:
    # The extremes are NaN if anything is. isfinite would take twice the tensor's memory and twenty times the time.
    return tensor.numel() == 0 or all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(tensor))


def _infos(shard: Sequence[Step], dtype: torch.dtype) -> dict[str, TensorInfo]:
    return {step.target: TensorInfo(step.shape, dtype) for step in shard}
