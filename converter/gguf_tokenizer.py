"""The tokenizer that a GGUF file's metadata describes."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from tokenizers import Tokenizer

from limpet.backend.checkpoint import TokenizerConfig
from limpet.converter.byte_bpe import LLAMA3_NAMES, build_byte_bpe
from limpet.converter.errors import ConversionError
from limpet.converter.sentencepiece_vocab import Piece, PieceType, SpaceRules, build_sentencepiece
from limpet.converter.source import SourceTokenizer
from limpet.converter.special_tokens import add_tokens, set_bos
from limpet.converter.text_file import as_record

_PREFIX = "tokenizer.ggml."
_TokenId = Annotated[int, Meta(ge=0)]


class _Keys(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata under `tokenizer.ggml.`."""

    model: str | None = None
    pre: str | None = None
    tokens: list[str] = []
    token_type: list[PieceType] | None = None
    scores: list[float] | None = None
    merges: list[str] = []
    bos_token_id: _TokenId | None = None
    eos_token_id: _TokenId | None = None
    eot_token_id: _TokenId | None = None
    eom_token_id: _TokenId | None = None
    padding_token_id: _TokenId | None = None
    unknown_token_id: _TokenId | None = None
    add_bos_token: bool | None = None
    add_space_prefix: bool = True
    remove_extra_whitespaces: bool = False

    def text_of(self, token_id: int | None) -> str | None:
        return self.tokens[token_id] if token_id is not None and token_id < len(self.tokens) else None

    def of_type(self, kind: PieceType) -> list[str]:
        return [token for token, found in zip(self.tokens, self.token_type or (), strict=False) if found is kind]

    @property
    def adds_bos(self) -> bool:
        """Where the file does not say, as llama.cpp: SentencePiece vocabularies and Llama 3's do."""
        return (
            self.add_bos_token if self.add_bos_token is not None else self.model == "llama" or self.pre in LLAMA3_NAMES
        )

    @property
    def end_ids(self) -> tuple[int, ...]:
        ids = (self.eos_token_id, self.eot_token_id, self.eom_token_id)
        return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def read_gguf_tokenizer(metadata: Mapping[str, Any]) -> SourceTokenizer:
    """Build it; raises ConversionError without a tokenizer, of an unknown kind, or without its pre-tokenizer's name."""
    stated = {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}
    keys = as_record(stated, _Keys, "The GGUF file's metadata")
    if keys.model is None or not keys.tokens:
        raise ConversionError("The GGUF file has no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens).")
    if keys.model not in _BUILDERS:
        known = ", ".join(_BUILDERS)
        raise ConversionError(f"The GGUF file's tokenizer {keys.model!r} is not supported; known are {known}.")
    tokenizer = _BUILDERS[keys.model](keys)
    bos = keys.text_of(keys.bos_token_id)
    add_bos = keys.adds_bos and bos is not None
    set_bos(tokenizer, bos if add_bos else None)
    config = TokenizerConfig(
        bos_token=bos,
        eos_token=keys.text_of(keys.eos_token_id),
        pad_token=keys.text_of(keys.padding_token_id),
        unk_token=keys.text_of(keys.unknown_token_id),
        add_bos=add_bos,
    )
    template = metadata.get("tokenizer.chat_template")
    return SourceTokenizer(tokenizer, config, template if isinstance(template, str) else None, keys.end_ids)


def _byte_level(keys: _Keys) -> Tokenizer:
    if keys.pre is None:
        raise ConversionError(
            "The GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre), so it would tokenise wrongly: "
            "use a file made by a newer llama.cpp."
        )
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in keys.merges)]
    vocabulary = {token: index for index, token in enumerate(keys.tokens)}
    tokenizer = build_byte_bpe(vocabulary, merges, keys.pre)
    add_tokens(tokenizer, keys.of_type(PieceType.CONTROL), keys.of_type(PieceType.USER_DEFINED))
    return tokenizer


def _sentencepiece(keys: _Keys) -> Tokenizer:
    size = len(keys.tokens)
    scores = keys.scores or [0.0] * size
    kinds = keys.token_type or [PieceType.NORMAL] * size
    if len(scores) != size or len(kinds) != size:
        raise ConversionError("The GGUF file's tokens, scores and token types differ in number.")
    pieces = [Piece(*piece) for piece in zip(keys.tokens, scores, kinds, strict=True)]
    spaces = SpaceRules(prefix=keys.add_space_prefix, remove_extra=keys.remove_extra_whitespaces)
    return build_sentencepiece(pieces, spaces)


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}
