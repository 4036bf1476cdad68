"""The tokenizer of a Hugging Face folder: tokenizer.json, and what lies beside it in other files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from limpet.backend.checkpoint import GenerationDefaults, TokenizerConfig
from limpet.converter.errors import ConversionError
from limpet.converter.json_file import read_json_if_present
from limpet.converter.source import SourceTokenizer
from limpet.converter.special_tokens import set_bos, starts_with

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


def read_hf_tokenizer(folder: Path, config: Mapping[str, Any]) -> SourceTokenizer:
    """Read it; `config` is config.json. Raises ConversionError if the folder has no tokenizer."""
    tokenizer = _load(folder)
    settings = read_json_if_present(folder / "tokenizer_config.json")
    names = {key: _text(settings.get(key)) for key in _NAMED}
    names = {**read_special_tokens_map(folder), **{key: name for key, name in names.items() if name}}
    _add_missing_tokens(tokenizer, settings, names)
    bos = names.get("bos_token") or _token_of_id(tokenizer, config.get("bos_token_id"))
    add_bos = _settle_bos(tokenizer, settings.get("add_bos_token"), bos)
    generation = read_json_if_present(folder / "generation_config.json")
    tokenizer_config = TokenizerConfig(
        bos_token=bos,
        eos_token=names.get("eos_token"),
        pad_token=names.get("pad_token"),
        unk_token=names.get("unk_token"),
        add_bos=add_bos,
        generation=read_generation_defaults(generation),
    )
    ends = [*_ids(config), *_ids(generation)]
    if (eos := names.get("eos_token")) and (eos_id := tokenizer.token_to_id(eos)) is not None:
        ends.append(eos_id)
    return SourceTokenizer(tokenizer, tokenizer_config, read_template(folder, settings), tuple(dict.fromkeys(ends)))


def read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template: its own file first, as in transformers, then tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text("utf-8")
    template = settings.get("chat_template") or read_json_if_present(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template or None


def read_generation_defaults(generation: Mapping[str, Any]) -> GenerationDefaults:
    """The values it states; as in vLLM they count whether or not `do_sample` is set."""
    fields = ("temperature", "top_k", "top_p", "repetition_penalty")
    return GenerationDefaults(**{key: generation[key] for key in fields if generation.get(key) is not None})


def _load(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ConversionError(f"No tokenizer.json in {folder.name}: the model has no tokenizer.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  the library raises plain Exception
        raise ConversionError(f"tokenizer.json cannot be read ({error}).") from None
    # Some files keep the limits of their training run.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_special_tokens_map(folder: Path) -> dict[str, str | None]:
    entries = read_json_if_present(folder / "special_tokens_map.json")
    return {key: _text(entries.get(key)) for key in _NAMED}


def _add_missing_tokens(tokenizer: Tokenizer, settings: Mapping[str, Any], names: Mapping[str, str | None]) -> None:
    """Tokens that tokenizer_config.json declares but tokenizer.json does not hold as added tokens."""
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    declared = sorted(settings.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    tokens = {entry["content"]: _added_token(entry) for _, entry in declared}
    for name in filter(None, names.values()):
        tokens.setdefault(name, AddedToken(name, special=True, normalized=False))
    for content, token in tokens.items():
        if content not in present:
            (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    flags = {
        key: bool(entry[key]) for key in ("lstrip", "rstrip", "normalized", "single_word", "special") if key in entry
    }
    return AddedToken(entry["content"], **flags)


def _settle_bos(tokenizer: Tokenizer, wanted: bool | None, bos: str | None) -> bool:
    """Make the tokenizer do what tokenizer_config.json says about BOS, where it says something."""
    adds = starts_with(tokenizer, bos)
    if wanted is None or wanted == adds or bos is None:
        return adds
    set_bos(tokenizer, bos if wanted else None)
    return wanted


def _ids(config: Mapping[str, Any]) -> list[int]:
    value = config.get("eos_token_id")
    if value is None:
        return []
    return [int(i) for i in value] if isinstance(value, list) else [int(value)]


def _token_of_id(tokenizer: Tokenizer, token_id: Any) -> str | None:
    return tokenizer.id_to_token(token_id) if isinstance(token_id, int) else None


def _text(token: Any) -> str | None:
    """A token's text, which may stand alone or in an object with flags."""
    return token.get("content") if isinstance(token, Mapping) else token
