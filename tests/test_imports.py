"""The direction of imports between the folders (who may know whom), read from the sources."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("backend", "benchmarks", "client", "commands", "converter", "kernels", "model_repository", "webui")

# Folder -> modules of Limpet that it may import; a prefix counts for what lies below it.
ALLOWED = {
    "backend": ("limpet.backend", "limpet.kernels"),
    "benchmarks": (
        "limpet.benchmarks",
        "limpet.backend",
        "limpet.client",
        "limpet.commands",
        "limpet.converter",
        "limpet.kernels",
    ),
    "client": ("limpet.client",),
    "commands": ("limpet.commands",),  # the commands' modules by name, once Ctrl-C is seen to
    "converter": ("limpet.converter", "limpet.backend.checkpoint", "limpet.backend.config", "limpet.model_repository"),
    "kernels": ("limpet.kernels",),
    "model_repository": ("limpet.backend",),
    "webui": ("limpet.webui", "limpet.client", "limpet.commands"),
}
# Files and folders that must work, or start fast, without torch.
WITHOUT_TORCH = (
    "client",
    "commands",
    "model_repository",
    "webui",
    "backend/front_end",
    "backend/link",
    "backend/serve",
    "backend/checkpoint.py",
    "backend/config.py",
    "backend/sampling_params.py",
    "backend/core.py",
    "backend/block_pool.py",
    "backend/scheduler.py",
    "backend/cache_manager.py",
    "backend/prefix_hash.py",
    "backend/tokenizer.py",
    "backend/detokenizer.py",
    "backend/chat_template.py",
)
TORCH_FAMILY = ("torch", "triton", "transformers", "safetensors.torch", "limpet.kernels")


def _sources(place: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def _imports(source: Path) -> Iterator[str]:
    """Names that a file imports, those inside functions included."""
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _offences(place: str, offends: Callable[[str], bool]) -> list[str]:
    return [
        f"{source.relative_to(ROOT)}: {name}"
        for source in _sources(place)
        for name in _imports(source)
        if offends(name)
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_imports_only_what_it_may_know(folder: str) -> None:
    allowed = ALLOWED[folder]
    assert not _offences(folder, lambda name: _within(name, ("limpet",)) and not _within(name, allowed))


@pytest.mark.parametrize("place", WITHOUT_TORCH)
def test_place_imports_no_torch(place: str) -> None:
    assert _sources(place), f"{place} is gone: take it off this list"
    assert not _offences(place, lambda name: _within(name, TORCH_FAMILY))


def test_kernels_import_torch_and_triton_only() -> None:
    third_party = ("numpy", "msgspec", "transformers", "limpet.backend", "limpet.client")
    assert not _offences("kernels", lambda name: _within(name, third_party))


def test_nothing_imports_the_sources_under_their_folders_names() -> None:
    for place in (*FOLDERS, "tests", "docs"):
        assert not _offences(place, lambda name: _within(name, FOLDERS))
