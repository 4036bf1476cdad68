"""The tokenizer of a Hugging Face folder: tokenizer.json, and what lies beside it in other files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from limpet.backend.checkpoint import GenerationDefaults, TokenizerConfig
from limpet.converter.errors import ConversionError
from limpet.converter.json_file import read_json_if_present
from limpet.converter.sentencepiece_model import read_sentencepiece_model
from limpet.converter.sentencepiece_vocab import build_sentencepiece
from limpet.converter.source import SourceTokenizer
from limpet.converter.special_tokens import add_tokens, set_bos, starts_with
from limpet.converter.tiktoken_vocab import BEGIN, END_OF_TURN, build_llama3, is_tiktoken

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


def read_hf_tokenizer(folder: Path, config: Mapping[str, Any]) -> SourceTokenizer:
    """Read it; `config` is config.json. Raises ConversionError if the folder has no tokenizer."""
    tokenizer, names = _load(folder)
    settings = read_json_if_present(folder / "tokenizer_config.json")
    for stated in (read_json_if_present(folder / "special_tokens_map.json"), settings):
        names |= {key: text for key in _NAMED if (text := _text(stated.get(key)))}
    _add_missing_tokens(tokenizer, folder, settings, names)
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
    stated = {key: value for key, value in generation.items() if value is not None}
    try:
        return msgspec.convert(stated, GenerationDefaults, strict=False)
    except msgspec.ValidationError as error:
        raise ConversionError(f"generation_config.json has a value of the wrong kind ({error}).") from None


def _load(folder: Path) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of the folder's one file or the other, and the names of special tokens that the file states."""
    if (folder / "tokenizer.json").exists():
        return _load_json(folder / "tokenizer.json"), {}
    path = folder / "tokenizer.model"
    if not path.exists():
        raise ConversionError(f"No tokenizer.json or tokenizer.model in {folder.name}: the model has no tokenizer.")
    if is_tiktoken(path):
        return build_llama3(path), {"bos_token": BEGIN, "eos_token": END_OF_TURN}
    model = read_sentencepiece_model(path)
    tokenizer = build_sentencepiece(model.pieces, model.add_dummy_prefix)
    set_bos(tokenizer, model.bos)
    return tokenizer, {key: text for key, text in (("bos_token", model.bos), ("eos_token", model.eos)) if text}


def _load_json(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise ConversionError(f"{path.name} cannot be read ({error}).") from None
    # Some files keep the limits of their training run.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _add_missing_tokens(
    tokenizer: Tokenizer, folder: Path, settings: Mapping[str, Any], names: Mapping[str, str]
) -> None:
    """Tokens that the folder's other files declare but the tokenizer does not keep whole; raises ConversionError if
    they would get other ids than the files say."""
    by_id = {int(token_id): _added_token(entry) for token_id, entry in settings.get("added_tokens_decoder", {}).items()}
    for content, token_id in read_json_if_present(folder / "added_tokens.json").items():
        by_id.setdefault(int(token_id), AddedToken(content, normalized=False))
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token_id, token in sorted(by_id.items()):
        if token.content not in present:
            (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(token.content) != token_id:
            raise ConversionError(
                f"Token {token.content!r} has id {tokenizer.token_to_id(token.content)}, not {token_id}."
            )
    whole = present | {token.content for token in by_id.values()}
    known = [name for name in names.values() if tokenizer.token_to_id(name) is not None]
    add_tokens(tokenizer, [name for name in known if name not in whole])


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
