"""Verifying converted models: every file's size and checksum, every weight's name, type and shape."""

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer

from limpet.backend.checkpoint import CheckpointDir, CheckpointError, FileEntry, Manifest, ModelConfig
from limpet.converter.chat_template import is_append_only
from limpet.converter.errors import ConversionError
from limpet.converter.library_faults import told_as
from limpet.converter.links import file_entry
from limpet.converter.rules import TensorInfo
from limpet.converter.safetensors_file import SafetensorsReader
from limpet.converter.targets import target_shapes
from limpet.converter.weights import Progress
from limpet.converter.workspace import repository_of


def find_models(path: Path) -> list[Path]:
    """The converted models at a path: a model's folder, a repository or a workspace; raises ConversionError if none."""
    for folders in ([path], _children(path), _children(repository_of(path))):
        models = [folder for folder in folders if CheckpointDir(folder).manifest_path.exists()]
        if models:
            return models
    raise ConversionError(f"{path} holds no converted model.")


def check_model(root: Path, progress: Progress) -> Manifest:
    """Read the whole model; raises CheckpointError or ConversionError naming the first thing that is wrong."""
    checkpoint = CheckpointDir(root)
    manifest = checkpoint.manifest()
    weight_files = checkpoint.weight_files()
    _require_no_other_files(checkpoint, manifest)
    for name, entry in manifest.files.items():
        _require_checksum(checkpoint.folder / name, entry, progress)
    _require_weights(weight_files, manifest.linked, checkpoint.model_config())
    with told_as("tokenizer.json cannot be read"):
        Tokenizer.from_file(str(checkpoint.tokenizer_path))
    template = checkpoint.chat_template()
    if template is not None:
        is_append_only(template, checkpoint.tokenizer_config())
    return manifest


def _children(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _require_no_other_files(checkpoint: CheckpointDir, manifest: Manifest) -> None:
    known = {*manifest.files, checkpoint.manifest_path.name}
    others = sorted(path.name for path in checkpoint.folder.iterdir() if path.name not in known)
    if others:
        raise CheckpointError(f"{others[0]} is not in the manifest: remove it or convert the model again.")


def _require_checksum(path: Path, entry: FileEntry, progress: Progress) -> None:
    if file_entry(path, progress) != entry:
        raise CheckpointError(f"{path.name} was changed after the conversion: convert the model again.")


def _require_weights(files: list[Path], linked: Mapping[str, Mapping[str, str]], config: ModelConfig) -> None:
    dtype = getattr(torch, config.dtype)
    expected = {name: TensorInfo(shape, dtype) for name, shape in target_shapes(config).items()}
    found: dict[str, TensorInfo] = {}
    for path in files:
        stored = SafetensorsReader(path).tensors
        names = linked.get(path.name, {name: name for name in stored})
        found |= {weight: stored[name] for name, weight in names.items() if name in stored}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        raise CheckpointError(f"Weight {wrong[0]} does not fit the configuration: convert the model again.")
