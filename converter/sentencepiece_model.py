"""Reading a SentencePiece tokenizer.model, a Protocol Buffers message of which few fields matter here.

ModelProto: 1 pieces (1 text, 2 score, 3 type), 2 trainer_spec (3 model_type, 41 bos_id, 42 eos_id), 3 normalizer_spec
(2 precompiled_charsmap, 3 add_dummy_prefix, 4 remove_extra_whitespaces, 5 escape_whitespaces). The classes that
sentencepiece ships load beside few releases of protobuf.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from limpet.converter.errors import ConversionError
from limpet.converter.sentencepiece_vocab import Piece, PieceType, SpaceRules

_Value: TypeAlias = int | bytes
_UNIGRAM, _BPE = 1, 2


@dataclass(frozen=True)
class SentencePieceModel:
    pieces: list[Piece]
    spaces: SpaceRules
    bos_id: int
    eos_id: int

    @property
    def bos(self) -> str | None:
        return self._text_of(self.bos_id)

    @property
    def eos(self) -> str | None:
        return self._text_of(self.eos_id)

    def _text_of(self, index: int) -> str | None:
        """None for an id that is no piece: -1, which says that there is none, arrives as 2**64 - 1."""
        return self.pieces[index].text if index < len(self.pieces) else None


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """Parse the file; raises ConversionError if it is no SentencePiece model, or of a kind that Llama does not use."""
    pieces: list[Piece] = []
    trainer: dict[int, _Value] = {}
    normalizer: dict[int, _Value] = {}
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 1:
                pieces.append(_piece(dict(_fields(_message(value)))))
            elif number == 2:
                trainer = dict(_fields(_message(value)))
            elif number == 3:
                normalizer = dict(_fields(_message(value)))
        bos_id, eos_id = _number(trainer.get(41, 1)), _number(trainer.get(42, 2))
    except (LookupError, TypeError, ValueError, struct.error):
        raise ConversionError(f"{path.name} is no SentencePiece model.") from None
    if not pieces:
        raise ConversionError(f"{path.name} is no SentencePiece model.")
    if trainer.get(3, _UNIGRAM) != _BPE or normalizer.get(2, b"") != b"" or not normalizer.get(5, True):
        raise ConversionError(f"{path.name} is no plain BPE model: a tokenizer.json is needed beside it.")
    spaces = SpaceRules(prefix=bool(normalizer.get(3, True)), remove_extra=bool(normalizer.get(4, True)))
    return SentencePieceModel(pieces, spaces, bos_id, eos_id)


def _piece(fields: dict[int, _Value]) -> Piece:
    (score,) = struct.unpack("<f", _message(fields.get(2, bytes(4))))
    return Piece(_message(fields[1]).decode(), score, PieceType(_number(fields.get(3, PieceType.NORMAL))))


def _message(value: _Value) -> bytes:
    if isinstance(value, int):
        raise TypeError("a number where bytes belong")
    return value


def _number(value: _Value) -> int:
    if isinstance(value, bytes):
        raise TypeError("bytes where a number belongs")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, _Value]]:
    """Field numbers with their values: integers, or the bytes of anything else."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if wire_type == 2:
            length, position = _varint(data, position)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ValueError("unknown wire type")
        if position + length > len(data):
            raise ValueError("field past the end")
        yield number, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("number of more than 64 bits")
