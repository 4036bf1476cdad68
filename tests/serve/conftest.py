import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

_MODELS = Path(__file__).with_name("models")


def _add_model(repository: Path, name: str, source: str) -> None:
    version = repository / name / "1"
    version.mkdir(parents=True)
    shutil.copy(_MODELS / "config.pbtxt", version.parent)
    shutil.copy(_MODELS / f"{source}.py", version / "model.py")


@pytest.fixture
def make_repository(tmp_path: Path) -> Callable[..., Path]:
    """Makes a model repository of limpet_admin (without an engine) and further models by their files' names.

    limpet_admin passes for a converted model too: it is the one to drain.
    """

    def make(*others: str) -> Path:
        for name in ("limpet_admin", *others):
            _add_model(tmp_path / "repository", name, name)
        checkpoint = tmp_path / "repository" / "limpet_admin" / "1" / "checkpoint"
        checkpoint.mkdir()
        (checkpoint / "manifest.json").touch()
        return tmp_path / "repository"

    return make
