"""Finding out what kind of checkpoint a path is."""

from pathlib import Path

from limpet.converter.errors import ConversionError
from limpet.converter.gguf_file import gguf_models, is_gguf
from limpet.converter.gguf_source import open_gguf
from limpet.converter.hf_source import find_format, open_hf_folder
from limpet.converter.meta_source import find_meta_folder, open_meta_folder
from limpet.converter.source import Source
from limpet.converter.source_folder import SourceFolder


def open_source(path: Path) -> Source:
    """A GGUF file, a Hugging Face folder, a Meta folder or a folder with one GGUF model; ConversionError for others."""
    if path.is_dir():
        return _open_folder(SourceFolder(path))
    if not path.exists():
        raise ConversionError(f"{path} does not exist.")
    if is_gguf(path):
        return open_gguf(path)
    raise ConversionError(f"{path} is no GGUF file and no folder.")


def _open_folder(folder: SourceFolder) -> Source:
    models = gguf_models(folder.path)
    # Beside GGUF files a configuration often lies alone.
    if folder.file("config.json").exists() and (not models or find_format(folder) is not None):
        return open_hf_folder(folder)
    meta_folder = find_meta_folder(folder)
    if meta_folder is not None:
        return open_meta_folder(meta_folder)
    if len(models) == 1:
        return open_gguf(folder.file(models[0]))
    if models:
        names = ", ".join(models)
        raise ConversionError(f"{folder.path} holds several GGUF models ({names}): name one of these files.")
    raise ConversionError(
        f"{folder.path} holds no checkpoint: no config.json, no params.json and no GGUF file is there."
    )
