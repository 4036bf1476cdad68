"""Files that torch.save wrote (.bin, .pth), read without running a pickle's code and one tensor at a time."""

import pickle
import zipfile
from pathlib import Path

import torch

from limpet.converter.errors import ConversionError
from limpet.converter.rules import TensorInfo


class TorchReader:
    """The tensors of one file; raises ConversionError if it holds anything else or is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Older files are no zip archives and cannot be mapped; loading them for every tensor would take too long.
        self._whole = None if _is_zip(path) else self._load(mapped=False)
        tensors = self._load(mapped=True) if self._whole is None else self._whole
        self.tensors = {name: self._describe(name, tensor) for name, tensor in tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        if self._whole is not None:
            return self._whole[name]
        # The map goes at once, so that its pages do not count as this process's memory.
        return self._load(mapped=True)[name].clone()

    def _describe(self, name: str, tensor: torch.Tensor) -> TensorInfo:
        if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta:
            raise ConversionError(f"Tensor {name} in {self.path.name} is no plain matrix: not supported.")
        return TensorInfo(tuple(tensor.shape), tensor.dtype)

    def _load(self, mapped: bool) -> dict[str, torch.Tensor]:
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError:
            raise ConversionError(
                f"{self.path.name} holds more than tensors or is damaged: it is not opened."
            ) from None
        except Exception:  # noqa: BLE001 - a damaged pickle may fail in every way that Python can
            raise ConversionError(f"{self.path.name} cannot be read: it is damaged or cut short.") from None
        if not isinstance(content, dict):
            raise ConversionError(f"{self.path.name} holds no table of tensors.")
        return {str(name): tensor for name, tensor in content.items() if isinstance(tensor, torch.Tensor)}


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # one that Python would not read
        return True
