"""The folders that a conversion writes: built beside their places, then put there by renaming."""

import re
import shutil
import signal
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import limpet.model_repository
from limpet.converter.errors import ConversionError

# A namespace package: importlib.resources stumbles over the extra path entry of an editable install.
TEMPLATES = next(path for path in map(Path, limpet.model_repository.__path__) if path.is_dir())
ADMIN = "limpet_admin"
INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, kill, a terminal that goes
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
def published(workspace: Path, names: Iterable[str]) -> Iterator[Path]:
    """A new folder to fill with models of these names, which take their places in the repository at the end.

    All of them or none: after a failure everything is as it was before. They go in the order of the names; Ctrl-C
    counts until the first goes.
    """
    repository = repository_of(workspace)
    with _made(repository):
        # In the workspace and not in the repository: a polling server would load a half-written model.
        scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=workspace))
        try:
            building, replaced = scratch / "models", scratch / "replaced"
            building.mkdir()
            replaced.mkdir()
            yield building
            with uninterrupted():
                _put([building / name for name in names if (building / name).exists()], repository, replaced)
                shutil.rmtree(scratch, ignore_errors=True)
        except BaseException:
            with uninterrupted():
                shutil.rmtree(scratch, ignore_errors=True)
            raise


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """The folder and those that lead to it; after a failure the new ones are gone again."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for each in new:
            with suppress(OSError):
                each.rmdir()
        raise


def _put(models: Sequence[Path], repository: Path, replaced: Path) -> None:
    with ExitStack() as undo:
        for model in models:
            target = repository / model.name
            if target.exists():
                target.rename(replaced / model.name)
                undo.callback((replaced / model.name).rename, target)
            model.rename(target)
            undo.callback(target.rename, model)
        undo.pop_all()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Interruptions count for nothing inside: this is short, and must not be left half done."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in INTERRUPTIONS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_model_files(folder: Path, face: Face, parameters: str) -> None:
    """Make the folder, named as the model, with config.pbtxt and model.py; `parameters` are the former's blocks."""
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(render_config(folder.name, face, parameters), "utf-8")
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


def add_admin_model(building: Path, repository: Path) -> None:
    """Build the administration model, if the repository has none."""
    if not (repository / ADMIN).exists():
        shutil.copytree(TEMPLATES / ADMIN, building / ADMIN, ignore=shutil.ignore_patterns("__pycache__"))
