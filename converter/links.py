"""Hard links to the source's own files, for weights that need no change."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from limpet.backend.checkpoint import FileEntry, ModelConfig
from limpet.converter.errors import ConversionError
from limpet.converter.rules import Step
from limpet.converter.source import TensorStore
from limpet.converter.weights import Progress, read_parts, torch_dtype

_CHUNK_BYTES = 1 << 24
LinkedSteps = Mapping[Path, list[Step]]


def split_linkable(steps: Iterable[Step], store: TensorStore, config: ModelConfig) -> tuple[LinkedSteps, list[Step]]:
    """The steps that are one tensor of a safetensors file, by file, and the steps that must be written.

    Raises ConversionError if there is nothing to link.
    """
    linked: dict[Path, list[Step]] = {}
    written: list[Step] = []
    for step in steps:
        path = _file_of(step, store, config)
        if path is None:
            written.append(step)
        else:
            linked.setdefault(path, []).append(step)
    if not linked:
        raise ConversionError(f"Nothing can be linked: --link needs safetensors that hold {config.dtype}.")
    return linked, written


def link_name(path: Path) -> str:
    return f"linked-{path.name}"


def link_files(
    folder: Path, linked: LinkedSteps, store: TensorStore, config: ModelConfig, progress: Progress
) -> dict[str, FileEntry]:
    """Link the files into the folder; raises ConversionError for values that no model can use."""
    entries = {}
    for path, steps in linked.items():
        for step in steps:
            progress(sum(part.nbytes for part in read_parts(step, store, config)))
        target = folder / link_name(path)
        # The file itself: Hugging Face's cache holds symbolic links to it.
        os.link(path.resolve(), target)
        entries[target.name] = file_entry(target)
    return entries


def file_entry(path: Path, progress: Progress = lambda num_bytes: None) -> FileEntry:
    """Size and checksum of a file, read in pieces."""
    sha256, num_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            sha256.update(chunk)
            num_bytes += len(chunk)
            progress(len(chunk))
    return FileEntry(num_bytes, sha256.hexdigest())


def _file_of(step: Step, store: TensorStore, config: ModelConfig) -> Path | None:
    part = step.parts[0]
    unchanged = len(step.parts) == 1 and part.reorder is None
    return store.file_of(part.source) if unchanged and store.tensors[part.source].dtype == torch_dtype(config) else None
