"""Opening a Hugging Face folder as a source."""

from collections import Counter
from math import prod
from pathlib import Path, PurePosixPath

import torch

from limpet.backend.checkpoint import DType
from limpet.converter.errors import ConversionError
from limpet.converter.hf_config import find_architecture, read_model_config
from limpet.converter.hf_tokenizer import read_hf_tokenizer
from limpet.converter.json_file import read_json
from limpet.converter.rules import TensorInfo
from limpet.converter.safetensors_file import SafetensorsReader
from limpet.converter.source import Source

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES: dict[torch.dtype, DType] = {
    torch.float64: "float32",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


class HFStore:
    """The tensors of the safetensors files that the folder's index names, or of its single file."""

    def __init__(self, folder: Path) -> None:
        self._readers: dict[str, SafetensorsReader] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for path, names in _weight_files(folder).items():
            reader = SafetensorsReader(path)
            for name in names if names is not None else reader.tensors:
                if name not in reader.tensors:
                    raise ConversionError(f"{path.name} lacks tensor {name}, which the index places there.")
                self._readers[name] = reader
                self.tensors[name] = reader.tensors[name]

    def read(self, name: str) -> torch.Tensor:
        return self._readers[name].read(name)

    def main_dtype(self) -> DType:
        """The type that most of the weights have."""
        sizes: Counter[torch.dtype] = Counter()
        for info in self.tensors.values():
            sizes[info.dtype] += prod(info.shape)
        return _DTYPES[sizes.most_common(1)[0][0]]


def open_hf_folder(folder: Path) -> Source:
    """Read a folder's configuration, headers and tokenizer; raises ConversionError for what Limpet cannot serve."""
    raw = read_json(folder / "config.json")
    name, architecture = find_architecture(raw)
    store = HFStore(folder)
    tokenizer = read_hf_tokenizer(folder, raw)
    config = read_model_config(raw, store.main_dtype(), tokenizer.eos_token_ids)
    return Source(f"Hugging Face folder, {name}", folder.resolve().name, config, architecture.layout, store, tokenizer)


def _weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """Files to read and the tensors to take from each; None: all of them. Files no index names are not looked at."""
    if (folder / _INDEX).exists():
        return _indexed_files(folder)
    if (folder / _SINGLE).exists():
        return {folder / _SINGLE: None}
    raise ConversionError(f"No {_SINGLE} and no {_INDEX} in {folder.name}.")


def _indexed_files(folder: Path) -> dict[Path, list[str] | None]:
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(f"{_INDEX} has no weight_map.")
    files: dict[Path, list[str] | None] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or PurePosixPath(file_name).name != file_name or file_name in ("", ".", ".."):
            raise ConversionError(f"{_INDEX} places {name} in {file_name!r}; only files of the folder itself are read.")
        path = folder / file_name
        if not path.is_file():
            raise ConversionError(f"Shard {file_name}, which {_INDEX} names, is missing.")
        names = files.setdefault(path, [])
        assert names is not None
        names.append(name)
    return files
