"""The wheel: what the package map promises lies in the folders, and works away from this tree."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from setuptools.config.pyprojecttoml import load_file  # type: ignore[import-untyped]

from tests.aids.tiny import write_tiny

ROOT = Path(__file__).parent.parent
PROJECT = load_file(ROOT / "pyproject.toml")
ROOTS = sorted(PROJECT["tool"]["setuptools"]["package-dir"].values())
NOT_PACKAGED = ("tests", "docs", "build", "dist", "workspace")
# This environment's editable install would be found first: without it, only the wheel is left.
_HELP_FROM_WHEEL = """
import contextlib, importlib, io, sys
sys.meta_path = [each for each in sys.meta_path if "editable" not in getattr(each, "__module__", "")]
sys.path.insert(0, sys.argv[1])
commands, sys.argv[1:] = sys.argv[2:], ["--help"]
for command in commands:
    module, _, function = command.partition(":")
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
        getattr(importlib.import_module(module), function)()
    print("usage" in output.getvalue())
files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items() if name.startswith("limpet.")}
print(*filter(None, files.values()))  # folders without __init__.py have none
"""


_CONVERT_FROM_WHEEL = """
import sys
sys.meta_path = [each for each in sys.meta_path if "editable" not in getattr(each, "__module__", "")]
sys.path.insert(0, sys.argv.pop(1))
from limpet.commands.entry_points import convert
sys.exit(convert())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the files that git knows and their neighbours, in a folder of its own."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", *ROOTS):
        (source / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(built), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return next(built.glob("limpet-*.whl"))


def _code_folders() -> set[str]:
    """Folders with Python files; those below model_repository are templates, data to the package."""
    tops = [top for top in ROOT.iterdir() if top.is_dir() and top.name[0] != "." and top.name not in NOT_PACKAGED]
    folders = {path.parent.relative_to(ROOT) for top in tops for path in top.rglob("*.py")}
    return {"model_repository" if each.parts[0] == "model_repository" else str(each) for each in folders}


def test_package_list_equals_the_folders_with_code() -> None:
    listed = {name.removeprefix("limpet.").replace(".", "/") for name in PROJECT["tool"]["setuptools"]["packages"]}
    assert listed == _code_folders()


@pytest.mark.parametrize("folder", [root for root in ROOTS if root != "client"])
def test_folder_roots_shadow_nobodys_top_level_package(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    # What was measured, and the shell scripts, which need the whole tree, are not in it.
    code = [name for name in files if not name.startswith("benchmarks/results/") and not name.endswith(".sh")]
    packaged = {f"limpet/{name}" for name in code if name.split("/")[0] in ROOTS}
    assert packaged <= set(zipfile.ZipFile(wheel).namelist())


def test_wheel_brings_license_and_commands(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(entry_points).decode()
    assert {line.split(" = ")[0] for line in text.splitlines() if " = " in line} == set(PROJECT["project"]["scripts"])


def test_commands_of_the_wheel_work_outside_the_tree(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, timeout=120)
    commands = list(PROJECT["project"]["scripts"].values())
    command = [sys.executable, "-c", _HELP_FROM_WHEEL, str(target), *commands]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    *helped, files = run.stdout.splitlines()
    assert helped == ["True"] * len(commands), run.stderr
    assert all(path.startswith(str(target)) for path in files.split())
    write_tiny(tmp_path / "source")
    arguments = [str(target), "source", "--chat-template=llama2", "--alias=infer"]  # of the wheel's own files
    subprocess.run([sys.executable, "-c", _CONVERT_FROM_WHEEL, *arguments], cwd=tmp_path, check=True, timeout=120)
    assert (tmp_path / "workspace/model_repository/limpet_admin/1/model.py").is_file()
