"""The tokenizer of a Hugging Face folder: its one file, and what the files beside it add."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from tokenizers import AddedToken, Tokenizer

from limpet.backend.checkpoint import GenerationDefaults, TokenizerConfig
from limpet.converter.errors import ConversionError
from limpet.converter.library_faults import told_as
from limpet.converter.sentencepiece_model import read_sentencepiece_model
from limpet.converter.sentencepiece_vocab import Piece, PieceType, build_sentencepiece
from limpet.converter.source import SourceTokenizer
from limpet.converter.source_folder import SourceFolder
from limpet.converter.special_tokens import add_tokens, set_bos, starts_with
from limpet.converter.text_file import as_record, read_json_if_present, read_text
from limpet.converter.tiktoken_vocab import BEGIN, END_OF_TURN, build_llama3, is_tiktoken

_PLAIN_TEXTS = ("a", " The tide's 12 limpets,\n\n3 rocks. ", "Прилив 你好 😀")
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
_TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]


class _Token(msgspec.Struct, frozen=True):
    """A token with its flags; named special tokens are written with or without them."""

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False


class _NamedTemplate(msgspec.Struct, frozen=True):
    name: str
    template: str


class _Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of tokenizer_config.json that matter here, and of special_tokens_map.json."""

    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    add_bos_token: bool | None = None
    added_tokens_decoder: dict[_TokenId, _Token] | None = None
    chat_template: str | list[_NamedTemplate] | None = None
    legacy: bool | None = None

    def names(self) -> dict[str, str]:
        tokens = {key: getattr(self, key) for key in _NAMED}
        return {key: token if isinstance(token, str) else token.content for key, token in tokens.items() if token}


class _TokenizerModel(msgspec.Struct, frozen=True):
    type: str | None = None
    continuing_subword_prefix: str | None = None


class _TokenizerFile(msgspec.Struct, frozen=True):
    """What of tokenizer.json is looked at before the library reads it."""

    model: _TokenizerModel


class _EndIds(msgspec.Struct, frozen=True):
    """The same key of config.json and generation_config.json; some files say -1 where there is none."""

    eos_token_id: int | list[int] | None = None

    def ids(self) -> list[int]:
        ids = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        return [token_id for token_id in ids if token_id is not None and token_id >= 0]


def read_hf_tokenizer(folder: SourceFolder, config: Mapping[str, Any]) -> SourceTokenizer:
    """Read it; `config` is config.json. Raises ConversionError if the folder has no tokenizer."""
    settings = _read_settings(folder.file("tokenizer_config.json"))
    declared = _declared_tokens(folder, settings)
    tokenizer, names = _load(folder, declared, settings)
    names |= _read_settings(folder.file("special_tokens_map.json")).names() | settings.names()
    _add_missing_tokens(tokenizer, declared, names)
    _try(tokenizer)
    bos = names.get("bos_token")
    if bos is None and not folder.file("tokenizer_config.json").exists():
        bos = _token_of_id(tokenizer, config.get("bos_token_id"))
    generation = read_json_if_present(folder.file("generation_config.json"))
    tokenizer_config = TokenizerConfig(
        bos_token=bos,
        eos_token=names.get("eos_token"),
        pad_token=names.get("pad_token"),
        unk_token=names.get("unk_token"),
        add_bos=_settle_bos(tokenizer, settings.add_bos_token, bos),
        generation=_generation_defaults(generation),
    )
    ends = (
        as_record(config, _EndIds, "config.json").ids() + as_record(generation, _EndIds, "generation_config.json").ids()
    )
    eos_id = tokenizer.token_to_id(names["eos_token"]) if "eos_token" in names else None
    ends += [] if eos_id is None else [eos_id]
    return SourceTokenizer(tokenizer, tokenizer_config, _read_template(folder, settings), tuple(dict.fromkeys(ends)))


def _read_settings(path: Path) -> _Settings:
    return as_record(read_json_if_present(path), _Settings, path.name)


def _read_template(folder: SourceFolder, settings: _Settings) -> str | None:
    """The chat template: its own file first, as in transformers, then tokenizer_config.json."""
    path = folder.file("chat_template.jinja")
    if path.exists():
        return read_text(path)
    template = settings.chat_template or _read_settings(folder.file("chat_template.json")).chat_template
    if isinstance(template, list):
        return next((entry.template for entry in template if entry.name == "default"), None)
    return template or None


def _generation_defaults(generation: Mapping[str, Any]) -> GenerationDefaults:
    """The values it states; as in vLLM they count whether or not `do_sample` is set."""
    stated = {key: value for key, value in generation.items() if value is not None}
    return as_record(stated, GenerationDefaults, "generation_config.json")


def _load(
    folder: SourceFolder, declared: Mapping[int, _Token], settings: _Settings
) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer of the folder's one file or the other, and the names of special tokens that the file states."""
    if folder.file("tokenizer.json").exists():
        return _load_json(folder.file("tokenizer.json")), {}
    path = folder.file("tokenizer.model")
    if not path.exists():
        raise ConversionError(f"No tokenizer.json or tokenizer.model in {folder.name}: the model has no tokenizer.")
    if is_tiktoken(path):
        return build_llama3(path), {"bos_token": BEGIN, "eos_token": END_OF_TURN}
    model = read_sentencepiece_model(path)
    # "legacy" is transformers' word for SentencePiece's way: a space prefix after special tokens too.
    spaces = replace(model.spaces, prefix_after_special=settings.legacy is not False)
    model = replace(model, pieces=_with_declared(model.pieces, declared))
    tokenizer = build_sentencepiece(model.pieces, spaces)
    set_bos(tokenizer, model.bos)
    return tokenizer, {key: text for key, text in (("bos_token", model.bos), ("eos_token", model.eos)) if text}


def _with_declared(pieces: Sequence[Piece], declared: Mapping[int, _Token]) -> list[Piece]:
    """The pieces under the texts that the folder declares for their ids: InternLM2 names unused ones so."""
    kinds = {True: PieceType.CONTROL, False: PieceType.USER_DEFINED}
    return [
        Piece(token.content, piece.score, kinds[token.special])
        if (token := declared.get(token_id)) is not None and token.content != piece.text
        else piece
        for token_id, piece in enumerate(pieces)
    ]


def _load_json(path: Path) -> Tokenizer:
    data = path.read_bytes()
    with told_as(f"{path.name} cannot be read"):
        model = msgspec.json.decode(data, type=_TokenizerFile).model
        # On a BPE whose merges lack the prefix the library aborts the process.
        if model.continuing_subword_prefix and model.type != "WordPiece":
            raise ConversionError(f"{path.name} has a continuing_subword_prefix: not supported.")
        tokenizer = Tokenizer.from_buffer(data)
    # Some files keep the limits of their training run.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _declared_tokens(folder: SourceFolder, settings: _Settings) -> dict[int, _Token]:
    """Tokens by id that files beside the tokenizer's own one state."""
    others = as_record(read_json_if_present(folder.file("added_tokens.json")), dict[str, _TokenId], "added_tokens.json")
    return {token_id: _Token(content) for content, token_id in others.items()} | (settings.added_tokens_decoder or {})


def _add_missing_tokens(tokenizer: Tokenizer, declared: Mapping[int, _Token], names: Mapping[str, str]) -> None:
    """Keep declared and named tokens whole in text; raises ConversionError if one gets another id than declared."""
    whole = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token_id, token in sorted(declared.items()):
        if token.content not in whole:
            added = AddedToken(**msgspec.structs.asdict(token))
            (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([added])
        found = tokenizer.token_to_id(token.content)
        if found != token_id:
            raise ConversionError(f"Token {token.content!r} has id {found}, its file says {token_id}.")
    whole |= {token.content for token in declared.values()}
    known = [name for name in names.values() if tokenizer.token_to_id(name) is not None]
    add_tokens(tokenizer, [name for name in known if name not in whole])


def _try(tokenizer: Tokenizer) -> None:
    """Raise ConversionError for what the library finds wrong with a tokenizer only when it is used."""
    with told_as("The tokenizer fails on plain text"):
        for text in _PLAIN_TEXTS:
            tokenizer.decode(tokenizer.encode(text).ids)


def _settle_bos(tokenizer: Tokenizer, wanted: bool | None, bos: str | None) -> bool:
    """Make the tokenizer do what tokenizer_config.json says about BOS, where it says something."""
    adds = starts_with(tokenizer, bos)
    if wanted is None or wanted == adds or bos is None or tokenizer.token_to_id(bos) is None:
        return adds
    set_bos(tokenizer, bos if wanted else None)
    return wanted


def _token_of_id(tokenizer: Tokenizer, token_id: Any) -> str | None:
    return tokenizer.id_to_token(token_id) if isinstance(token_id, int) and 0 <= token_id < 1 << 31 else None
