"""Finding out what kind of checkpoint a path is."""

from pathlib import Path

from limpet.converter.errors import ConversionError
from limpet.converter.gguf_source import open_gguf
from limpet.converter.hf_source import open_hf_folder
from limpet.converter.meta_source import find_meta_folder, open_meta_folder
from limpet.converter.source import Source
from limpet.converter.source_folder import SourceFolder


def open_source(path: Path) -> Source:
    """A GGUF file, a Hugging Face folder or a Meta folder; raises ConversionError for anything else."""
    if path.is_dir():
        return _open_folder(SourceFolder(path))
    if not path.exists():
        raise ConversionError(f"{path} does not exist.")
    if path.suffix == ".gguf":
        return open_gguf(path)
    raise ConversionError(f"{path} is no GGUF file and no folder.")


def _open_folder(folder: SourceFolder) -> Source:
    if folder.file("config.json").exists():
        return open_hf_folder(folder)
    meta_folder = find_meta_folder(folder)
    if meta_folder is None:
        raise ConversionError(f"{folder.path} holds no checkpoint: neither config.json nor params.json is there.")
    return open_meta_folder(meta_folder)
