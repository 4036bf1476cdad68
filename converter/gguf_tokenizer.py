"""The tokenizer that a GGUF file's metadata describes."""

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from limpet.backend.checkpoint import TokenizerConfig
from limpet.converter.byte_bpe import LLAMA3_NAMES, build_byte_bpe
from limpet.converter.errors import ConversionError
from limpet.converter.sentencepiece_vocab import Piece, PieceType, build_sentencepiece
from limpet.converter.source import SourceTokenizer
from limpet.converter.special_tokens import add_tokens, set_bos

_KEY = "tokenizer.ggml."
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_gguf_tokenizer(metadata: Mapping[str, Any]) -> SourceTokenizer:
    """Build it; raises ConversionError without a tokenizer, of an unknown kind, or without its pre-tokenizer's name."""
    kind = metadata.get(f"{_KEY}model")
    if kind is None or f"{_KEY}tokens" not in metadata:
        raise ConversionError("The GGUF file has no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens).")
    if kind not in _BUILDERS:
        raise ConversionError(f"The GGUF file's tokenizer {kind!r} is not supported; known are {', '.join(_BUILDERS)}.")
    tokenizer = _BUILDERS[kind](metadata)
    bos = _token(metadata, "bos_token_id")
    add_bos = bool(metadata.get(f"{_KEY}add_bos_token", _adds_bos_by_default(metadata))) and bos is not None
    set_bos(tokenizer, bos if add_bos else None)
    config = TokenizerConfig(
        bos_token=bos,
        eos_token=_token(metadata, "eos_token_id"),
        pad_token=_token(metadata, "padding_token_id"),
        unk_token=_token(metadata, "unknown_token_id"),
        add_bos=add_bos,
    )
    ends = [int(metadata[f"{_KEY}{key}"]) for key in _END_KEYS if f"{_KEY}{key}" in metadata]
    template = metadata.get("tokenizer.chat_template")
    return SourceTokenizer(tokenizer, config, template, tuple(dict.fromkeys(ends)))


def _adds_bos_by_default(metadata: Mapping[str, Any]) -> bool:
    """Where the file does not say, as llama.cpp: SentencePiece vocabularies and Llama 3's do."""
    return metadata[f"{_KEY}model"] == "llama" or metadata.get(f"{_KEY}pre") in LLAMA3_NAMES


def _token(metadata: Mapping[str, Any], key: str) -> str | None:
    token_id = metadata.get(f"{_KEY}{key}")
    tokens = metadata[f"{_KEY}tokens"]
    return tokens[token_id] if token_id is not None and token_id < len(tokens) else None


def _types(metadata: Mapping[str, Any]) -> list[PieceType]:
    tokens = metadata[f"{_KEY}tokens"]
    return [PieceType(kind) for kind in metadata.get(f"{_KEY}token_type", [PieceType.NORMAL] * len(tokens))]


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    pre = metadata.get(f"{_KEY}pre")
    if pre is None:
        raise ConversionError(
            "The GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre), so it would tokenise wrongly: "
            "use a file made by a newer llama.cpp."
        )
    tokens = metadata[f"{_KEY}tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get(f"{_KEY}merges", ())]
    tokenizer = build_byte_bpe({token: index for index, token in enumerate(tokens)}, merges, pre)
    kinds = _types(metadata)
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind is PieceType.CONTROL]
    plain = [token for token, kind in zip(tokens, kinds, strict=True) if kind is PieceType.USER_DEFINED]
    add_tokens(tokenizer, special, plain)
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens = metadata[f"{_KEY}tokens"]
    scores = metadata.get(f"{_KEY}scores", [0.0] * len(tokens))
    pieces = [Piece(*piece) for piece in zip(tokens, scores, _types(metadata), strict=True)]
    return build_sentencepiece(pieces, bool(metadata.get(f"{_KEY}add_space_prefix", True)))


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}
