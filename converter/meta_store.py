"""Meta's checkpoint files: one part for each GPU of the original run, merged tensor by tensor."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from limpet.converter.errors import ConversionError
from limpet.converter.rules import TensorInfo
from limpet.converter.source_folder import SourceFolder
from limpet.converter.torch_file import TorchReader

# The dimension along which the parts of a tensor lie side by side; tensors of other names are in every part.
_SPLIT_DIMENSIONS = {
    r"layers\.\d+\.attention\.w[qkv]\.weight": 0,
    r"layers\.\d+\.feed_forward\.w[13]\.weight": 0,
    r"output\.weight": 0,
    r"layers\.\d+\.attention\.wo\.weight": 1,
    r"layers\.\d+\.feed_forward\.w2\.weight": 1,
}
_EMBEDDING = "tok_embeddings.weight"
_QUERY = "layers.0.attention.wq.weight"  # as many rows in all as the model's hidden size


class MetaStore:
    """The merged tensors of consolidated.00.pth, consolidated.01.pth, …; `hidden_size` is the model's `dim`."""

    def __init__(self, folder: SourceFolder, hidden_size: int) -> None:
        self._parts = [TorchReader(path) for path in _part_files(folder)]
        self._hidden_size = hidden_size
        self._require_all_parts()
        self.tensors: Mapping[str, TensorInfo] = {name: self._merged_info(name) for name in self._parts[0].tensors}

    def read(self, name: str) -> torch.Tensor:
        dimension = self._split_dimension(name)
        if dimension is None:
            return self._parts[0].read(name)
        return torch.cat([part.read(name) for part in self._parts], dim=dimension)

    def file_of(self, name: str) -> None:
        return None

    def _require_all_parts(self) -> None:
        query = self._parts[0].tensors.get(_QUERY)
        if query is None or query.shape[0] * len(self._parts) == self._hidden_size:
            return
        raise ConversionError(
            f"There are {len(self._parts)} parts consolidated.*.pth, each with {query.shape[0]} rows of {_QUERY}; the "
            f"model has {self._hidden_size}: a part is missing or belongs to another model."
        )

    def _merged_info(self, name: str) -> TensorInfo:
        first = self._parts[0].tensors[name]
        for part in self._parts:
            if part.tensors.get(name) != first:
                raise ConversionError(f"Tensor {name} differs in shape or is missing in {part.path.name}.")
        dimension = self._split_dimension(name)
        if dimension is None:
            return first
        shape = list(first.shape)
        shape[dimension] *= len(self._parts)
        return TensorInfo(tuple(shape), first.dtype)

    def _split_dimension(self, name: str) -> int | None:
        if name == _EMBEDDING:
            # Llama 1 and 2 split the embedding by columns, Llama 3 by rows.
            return 0 if self._parts[0].tensors[name].shape[1:] == (self._hidden_size,) else 1
        return next((split for pattern, split in _SPLIT_DIMENSIONS.items() if re.fullmatch(pattern, name)), None)


def _part_files(folder: SourceFolder) -> list[Path]:
    """The parts in order; raises ConversionError if one is missing."""
    files = [folder.file(path.name) for path in sorted(folder.path.glob("consolidated.*.pth"))]
    for number, path in enumerate(files):
        if path.name != f"consolidated.{number:02}.pth":
            raise ConversionError(f"consolidated.{number:02}.pth is missing in {folder.name}.")
    if not files:
        raise ConversionError(f"No consolidated.00.pth in {folder.name}.")
    return files
