"""More Triton models in front of the same engine, for clients that want other shapes or types."""

from dataclasses import dataclass
from pathlib import Path

from limpet.backend.config import ALIAS_OF, ConfigError, read_parameters
from limpet.converter.errors import ConversionError
from limpet.converter.workspace import ADMIN, Face, checked_name, write_model_files


@dataclass(frozen=True)
class AliasKind:
    """What a kind of alias is called by default ({model}: the model's name), and how it looks to Triton."""

    default_name: str
    face: Face


KINDS = {
    "trtllm": AliasKind("ensemble", Face(is_batched=True)),
    "trtllm-u32": AliasKind("ensemble_u32", Face(is_batched=True, count_type="TYPE_UINT32")),
    "infer": AliasKind("{model}_infer", Face(is_decoupled=False)),
}


@dataclass(frozen=True)
class Alias:
    """One alias to write."""

    name: str
    face: Face


def parse_aliases(wanted: tuple[str, ...], model: str) -> tuple[Alias, ...]:
    """From KIND or KIND=NAME; raises ConversionError."""
    aliases = tuple(_parse(text, model) for text in wanted)
    names = [model, ADMIN, *(alias.name for alias in aliases)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConversionError(f"Two models would be called {twice}: give an alias another name, --alias KIND=NAME.")
    return aliases


def require_free_alias(repository: Path, alias: Alias, model: str) -> None:
    """Raise ConversionError if another model than an alias of this one has that name."""
    folder = repository / alias.name
    if folder.exists() and _target(folder) != model:
        raise ConversionError(
            f"{folder} exists already and is no alias of {model}: give the alias another name, --alias KIND=NAME."
        )


def write_alias(building: Path, alias: Alias, model: str) -> None:
    """Build the alias beside its model."""
    parameters = (
        f"# Answered by this model's engine, with its settings.\n"
        f'parameters {{ key: "{ALIAS_OF}" value {{ string_value: "{model}" }} }}'
    )
    write_model_files(building / alias.name, alias.face, parameters)


def _parse(text: str, model: str) -> Alias:
    kind, _, name = text.partition("=")
    if kind not in KINDS:
        raise ConversionError(f"There is no alias {kind!r}: allowed are {', '.join(KINDS)}, each also as KIND=NAME.")
    return Alias(checked_name(name or KINDS[kind].default_name.format(model=model)), KINDS[kind].face)


def _target(folder: Path) -> str | None:
    try:
        return read_parameters(folder).get(ALIAS_OF)
    except ConfigError:
        return None
