"""Opening a Hugging Face folder as a source."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from limpet.converter.errors import ConversionError
from limpet.converter.hf_config import find_architecture, read_model_config
from limpet.converter.hf_tokenizer import read_hf_tokenizer
from limpet.converter.rules import TensorInfo, main_dtype, require_enough_tensors
from limpet.converter.safetensors_file import SafetensorsReader
from limpet.converter.source import Source
from limpet.converter.source_folder import SourceFolder
from limpet.converter.text_file import read_json
from limpet.converter.torch_file import TorchReader


@dataclass(frozen=True)
class Format:
    """One way of storing a folder's tensors: in a single file, or in those that an index names."""

    single: str
    open: Callable[[Path], SafetensorsReader | TorchReader]

    @property
    def index(self) -> str:
        return f"{self.single}.index.json"


# In the order of preference: unlike a pickle, safetensors holds nothing but tensors.
_FORMATS = (Format("model.safetensors", SafetensorsReader), Format("pytorch_model.bin", TorchReader))


class HFStore:
    """The tensors of the files that the folder's index names, or of its single file. Other files are not looked at."""

    def __init__(self, folder: SourceFolder) -> None:
        self._readers: dict[str, SafetensorsReader | TorchReader] = {}
        self.tensors: dict[str, TensorInfo] = {}
        form = find_format(folder)
        if form is None:
            known = " or ".join(each.single for each in _FORMATS)
            raise ConversionError(f"No {known} in {folder.name}, nor an index of their parts.")
        for path, names in _weight_files(folder, form).items():
            reader = form.open(path)
            for name in names if names is not None else reader.tensors:
                if name not in reader.tensors:
                    raise ConversionError(f"{path.name} lacks tensor {name}, which the index places there.")
                self._readers[name] = reader
                self.tensors[name] = reader.tensors[name]

    def read(self, name: str) -> torch.Tensor:
        return self._readers[name].read(name)

    def file_of(self, name: str) -> Path | None:
        reader = self._readers[name]
        return reader.path if isinstance(reader, SafetensorsReader) else None


def open_hf_folder(folder: SourceFolder) -> Source:
    """Read a folder's configuration, headers and tokenizer; raises ConversionError for what Limpet cannot serve."""
    raw = read_json(folder.file("config.json"))
    name, architecture = find_architecture(raw)
    store = HFStore(folder)
    tokenizer = read_hf_tokenizer(folder, raw)
    config = read_model_config(raw, main_dtype(store.tensors))
    require_enough_tensors(config, store.tensors)
    return Source(f"Hugging Face folder, {name}", folder.name, config, architecture.layout(config), store, tokenizer)


def find_format(folder: SourceFolder) -> Format | None:
    """How the folder stores its tensors, if it has any."""
    stored = (f for f in _FORMATS if folder.file(f.index).exists() or folder.file(f.single).exists())
    return next(stored, None)


def _weight_files(folder: SourceFolder, form: Format) -> dict[Path, list[str] | None]:
    """Files to read and the tensors to take from each; None: all of them."""
    if not folder.file(form.index).exists():
        return {folder.file(form.single): None}
    weight_map = read_json(folder.file(form.index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(f"{form.index} has no weight_map.")
    files: dict[Path, list[str] | None] = {}
    for name, file_name in weight_map.items():
        path = _inside(folder, file_name, form.index)
        names = files.setdefault(path, [])
        assert names is not None
        names.append(name)
    return files


def _inside(folder: SourceFolder, file_name: object, index: str) -> Path:
    """The path of a shard; raises ConversionError if the index leads out of the folder or to nothing."""
    if not isinstance(file_name, str) or PurePosixPath(file_name).name != file_name or file_name == "..":
        raise ConversionError(f"{index} names {file_name!r}; only files of the folder itself are read.")
    path = folder.file(file_name)
    if not path.is_file():
        raise ConversionError(f"Shard {file_name}, which {index} names, is missing.")
    return path
