"""What limpet-serve reads of the model repositories that it serves."""

from collections.abc import Iterable
from pathlib import Path

from limpet.backend.checkpoint import CheckpointDir
from limpet.backend.config import ConfigError, read_parameters
from limpet.backend.serve.errors import RefusedError


def admin_keys(repositories: Iterable[Path]) -> dict[str, str]:
    """The parameter `admin_key` of each converted model, by the model's name, "" where none is set; or RefusedError."""
    folders = [folder for repository in repositories for folder in sorted(repository.iterdir())]
    models = [folder for folder in folders if CheckpointDir(folder).manifest_path.is_file()]
    try:
        return {model.name: read_parameters(model).get("admin_key", "") for model in models}
    except ConfigError as error:
        raise RefusedError(str(error)) from None
