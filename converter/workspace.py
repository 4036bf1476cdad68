"""The folder that a conversion writes: built beside its place, then put there in one rename."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import limpet.model_repository
from limpet.backend.config import EngineConfig
from limpet.converter.engine_settings import render_parameters
from limpet.converter.errors import ConversionError

# A namespace package: importlib.resources stumbles over the extra path entry of an editable install.
TEMPLATES = next(path for path in map(Path, limpet.model_repository.__path__) if path.is_dir())
ADMIN = "limpet_admin"
_NO_NAME = r"[^A-Za-z0-9._-]"
_NO_BATCH = """\
# Of Triton, not of the engine: 0 means that tensors have no batch dimension. The engine's own limit of requests that
# run at once is the parameter max_batch_size below.
max_batch_size: 0"""
_BATCH_OF_ONE = """\
# Of Triton, not of the engine: every tensor has a batch dimension in front, of size 1.
max_batch_size: 1"""
_DECOUPLED = """\
# Every response is a delta of one stream; exactly one comes where `stream` is false.
model_transaction_policy { decoupled: true }"""
_NOT_DECOUPLED = """\
# Exactly one response to each request: `stream` is refused, and the infer calls of HTTP and gRPC work.
model_transaction_policy { decoupled: false }"""


@dataclass(frozen=True)
class Face:
    """How a model looks to Triton: its tensors' rank, whether it streams, the type of max_tokens and its like."""

    is_batched: bool = False
    is_decoupled: bool = True
    count_type: Literal["TYPE_INT32", "TYPE_UINT32"] = "TYPE_INT32"


def repository_of(workspace: Path) -> Path:
    return workspace / "model_repository"


def name_from(source: str) -> str:
    """The model's name after that of its source, as Triton, URLs and shells take it; raises ConversionError."""
    return checked_name(re.sub(rf"{_NO_NAME}+", "-", source).strip("-."))


def checked_name(name: str) -> str:
    """The name, unless Triton, a URL or a shell could stumble over it: then ConversionError."""
    if not name or name == ADMIN or name.startswith((".", "-")) or re.search(_NO_NAME, name):
        raise ConversionError(
            f"{name!r} cannot name a model: allowed are ASCII letters, digits, '.', '_' "
            f"and '-', no '.' or '-' in front, and not {ADMIN} (see --name)."
        )
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
    (folder / "config.pbtxt").write_text(render_config(name, Face(), render_parameters(engine)), "utf-8")
    (folder / "1").mkdir(exist_ok=True)
    shutil.copyfile(TEMPLATES / "model" / "model.py", folder / "1" / "model.py")


def render_config(name: str, face: Face, parameters: str) -> str:
    """The text of config.pbtxt; `parameters` are its blocks of that name."""
    text = (TEMPLATES / "model" / "config.pbtxt.in").read_text("utf-8")
    values = {
        "name": name,
        "batching": _BATCH_OF_ONE if face.is_batched else _NO_BATCH,
        "transaction_policy": _DECOUPLED if face.is_decoupled else _NOT_DECOUPLED,
        "count_type": face.count_type,
        "parameters": parameters,
    }
    for key, value in values.items():
        text = text.replace(f"{{{{{key}}}}}", value)
    return text


def add_admin_model(repository: Path) -> None:
    """Put the administration model beside the models, if the repository has none."""
    if not (repository / ADMIN).exists():
        with published(repository / ADMIN) as folder:
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(TEMPLATES / ADMIN, folder, ignore=ignore, dirs_exist_ok=True)
