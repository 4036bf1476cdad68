"""The folder of a checkpoint: its own files, and no path that leads out of it."""

import os
from pathlib import Path

from limpet.converter.errors import ConversionError

_CACHED_REPOSITORY = "models--"  # Hugging Face's cache: models--OWNER--NAME/snapshots/REVISION/FILE -> ../../blobs/HASH


class SourceFolder:
    """`name` is what people call the checkpoint: in Hugging Face's cache the repository's name, else the folder's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._real = _real(path)
        self._repository = _cached_repository(self._real)
        self.name = self._real.name if self._repository is None else self._repository.name.rpartition("--")[2]

    def file(self, name: str) -> Path:
        """The path of a file or folder in it, which need not exist.

        Raises ConversionError if it is a link that leads out of the folder. Those of Hugging Face's cache may lead to
        the blobs beside its snapshots.
        """
        path = self.path / name
        target = _real(path)
        is_blob = self._repository is not None and target.parent == self._repository / "blobs"
        if not (is_blob or target.is_relative_to(self._real)):
            raise ConversionError(
                f"{name} is a link that leads out of the folder {self.name}: put the file itself there."
            )
        return path


def _cached_repository(folder: Path) -> Path | None:
    """The folder in Hugging Face's cache that holds all files of the repository of which this is a snapshot."""
    snapshots = next((parent for parent in folder.parents if parent.name == "snapshots"), None)
    if snapshots is None or not snapshots.parent.name.startswith(_CACHED_REPOSITORY):
        return None
    return snapshots.parent


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # unlike Path.resolve it takes links that lead in a circle
