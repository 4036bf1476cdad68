"""Tokenizers of SentencePiece vocabularies: pieces with scores, from a tokenizer.model or a GGUF file."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from limpet.converter.special_tokens import add_tokens

_SPACE = "▁"


class PieceType(IntEnum):
    """SentencePiece's types of pieces, which GGUF's token types repeat."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    kind: PieceType


def build_sentencepiece(pieces: Sequence[Piece], add_space_prefix: bool = True) -> Tokenizer:
    """A tokenizer that encodes as SentencePiece's BPE with byte fallback does; it adds no BOS."""
    unknown = next((piece.text for piece in pieces if piece.kind is PieceType.UNKNOWN), None)
    vocabulary = {piece.text: index for index, piece in enumerate(pieces)}
    model = BPE(vocab=vocabulary, merges=derive_merges(pieces), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if add_space_prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_space_prefix else steps)
    special = [p.text for p in pieces if p.kind in (PieceType.CONTROL, PieceType.UNKNOWN)]
    add_tokens(tokenizer, special, [p.text for p in pieces if p.kind is PieceType.USER_DEFINED])
    return tokenizer


def derive_merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """The merges that SentencePiece's greedy search by score amounts to.

    Joining two pieces is allowed when the result is a piece; the best score goes first. Ties keep the vocabulary's
    order of the parts.
    """
    rank = {piece.text: index for index, piece in enumerate(pieces) if piece.kind is PieceType.NORMAL}
    joins: list[tuple[float, int, int, str, str]] = []
    for piece in pieces:
        if piece.kind is not PieceType.NORMAL:
            continue
        for cut in range(1, len(piece.text)):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in rank and right in rank:
                joins.append((-piece.score, rank[left], rank[right], left, right))
    return [(left, right) for *_, left, right in sorted(joins)]
