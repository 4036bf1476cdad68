"""Tokenizers of SentencePiece vocabularies: pieces with scores, from a tokenizer.model or a GGUF file."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
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


@dataclass(frozen=True)
class SpaceRules:
    """What happens to spaces before text is cut: one more in front, there only or after special tokens too."""

    prefix: bool = True
    prefix_after_special: bool = True
    remove_extra: bool = False


def build_sentencepiece(pieces: Sequence[Piece], spaces: SpaceRules) -> Tokenizer:
    """A tokenizer that encodes as SentencePiece's BPE with byte fallback does; it adds no BOS."""
    unknown = next((piece.text for piece in pieces if piece.kind is PieceType.UNKNOWN), None)
    user_defined = [piece.text for piece in pieces if piece.kind is PieceType.USER_DEFINED]
    model = BPE(
        vocab={piece.text: index for index, piece in enumerate(pieces)},
        merges=derive_merges(pieces),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
        ignore_merges=bool(user_defined),  # these come as words of their own, and no merge makes them
    )
    tokenizer = Tokenizer(model)
    _set_spaces(tokenizer, spaces, user_defined)
    add_tokens(tokenizer, [p.text for p in pieces if p.kind in (PieceType.CONTROL, PieceType.UNKNOWN)])
    return tokenizer


def _set_spaces(tokenizer: Tokenizer, spaces: SpaceRules, user_defined: Sequence[str]) -> None:
    steps: list[normalizers.Normalizer] = []
    words: list[pre_tokenizers.PreTokenizer] = []
    if spaces.remove_extra:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spaces.prefix and spaces.prefix_after_special:
        steps.append(normalizers.Prepend(_SPACE))
    elif spaces.prefix:
        words.append(pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False))
    if user_defined:
        longest_first = sorted(user_defined, key=len, reverse=True)
        words.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), behavior="isolated"))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    if words:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    undo = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if spaces.prefix else undo)


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
