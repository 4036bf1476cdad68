"""The folder that a conversion writes: built beside its place, then put there in one rename."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import limpet.model_repository
from limpet.backend.config import EngineConfig
from limpet.converter.engine_settings import render_parameters
from limpet.converter.errors import ConversionError

# A namespace package: importlib.resources stumbles over the extra path entry of an editable install.
_TEMPLATES = next(path for path in map(Path, limpet.model_repository.__path__) if path.is_dir())
ADMIN = "limpet_admin"


def repository_of(workspace: Path) -> Path:
    return workspace / "model_repository"


def model_name(wanted: str) -> str:
    """A name that Triton, URLs and shells take as it is; raises ConversionError if nothing is left of it."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", wanted).strip("-.")
    if not name or name == ADMIN:
        raise ConversionError(f"{wanted!r} cannot name a model: give another one with --name.")
    return name


def require_free(target: Path, force: bool) -> None:
    """Raise ConversionError if the target exists and may not be replaced."""
    if target.exists() and not force:
        raise ConversionError(f"{target} exists already: choose another --name or --dst, or replace it with --force.")


@contextmanager
def published(target: Path) -> Iterator[Path]:
    """A new folder to fill, which takes the target's place at the end; after a failure nothing of it is left."""
    workspace = target.parent.parent
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the workspace and not in the repository: a polling server would load a half-written model.
    scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=workspace))
    try:
        building = scratch / target.name
        building.mkdir()
        yield building
        _put(building, target, scratch / "replaced")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _put(building: Path, target: Path, replaced: Path) -> None:
    try:
        if target.exists():
            target.rename(replaced)
        building.rename(target)
    except BaseException:  # Ctrl-C between the two included
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        raise


def write_model_files(folder: Path, name: str, engine: EngineConfig) -> None:
    """config.pbtxt and model.py of a converted model."""
    template = (_TEMPLATES / "model" / "config.pbtxt.in").read_text("utf-8")
    text = template.replace("{{name}}", name).replace("{{parameters}}", render_parameters(engine))
    (folder / "config.pbtxt").write_text(text, "utf-8")
    (folder / "1").mkdir(exist_ok=True)
    shutil.copyfile(_TEMPLATES / "model" / "model.py", folder / "1" / "model.py")


def add_admin_model(repository: Path) -> None:
    """Put the administration model beside the models, if the repository has none."""
    if not (repository / ADMIN).exists():
        with published(repository / ADMIN) as folder:
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(_TEMPLATES / ADMIN, folder, ignore=ignore, dirs_exist_ok=True)
