"""Llama 3's tokenizer.model as Meta publishes it: lines of a base64 token and its rank (tiktoken's format)."""

import base64
import binascii
import itertools
from pathlib import Path

from tokenizers import Tokenizer

from limpet.converter.byte_bpe import build_byte_bpe
from limpet.converter.errors import ConversionError
from limpet.converter.special_tokens import add_tokens

BEGIN, END, END_OF_MESSAGE, END_OF_TURN = "<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"
_NUM_SPECIAL = 256
# The named ones by their place after the ranks; the others are reserved and numbered in order.
_NAMED_SPECIAL = {
    0: BEGIN,
    1: END,
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: END_OF_MESSAGE,
    9: END_OF_TURN,
    10: "<|python_tag|>",
}


def is_tiktoken(path: Path) -> bool:
    """Whether the file is text of this format and no SentencePiece model."""
    with path.open("rb") as file:
        first = file.readline(1000)
    fields = first.split()
    return len(fields) == 2 and fields[1].isdigit() and first.isascii()


def build_llama3(path: Path) -> Tokenizer:
    """Llama 3's tokenizer with its special tokens; raises ConversionError if a line is malformed."""
    ranks = _read_ranks(path)
    characters = bytes_to_characters()
    spelled = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges = [(spelled[left], spelled[right]) for left, right in _merges(ranks)]
    tokenizer = build_byte_bpe({spelled[token]: rank for token, rank in ranks.items()}, merges, "llama-bpe")
    add_tokens(tokenizer, _special_tokens())
    return tokenizer


def bytes_to_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: itself where it is printable, else the next character from U+0100."""
    printable = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(rest)}


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error):
        raise ConversionError(f"{path.name} is no list of base64 tokens with their ranks.") from None
    if sorted(ranks.values()) != list(range(len(lines))) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise ConversionError(f"{path.name} lacks a rank or a byte: it is damaged.")
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The last join of every token of several bytes, in the order of ranks."""
    tokens = sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
    return [parts for token in tokens if (parts := _last_join(token, ranks)) is not None]


def _last_join(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts left when all joins of a lower rank than the token's are made, best first."""
    parts = [token[place : place + 1] for place in range(len(token))]
    while len(parts) > 2:
        joins = [ranks.get(left + right, len(ranks)) for left, right in itertools.pairwise(parts)]
        rank = min(joins)
        place = joins.index(rank)
        if rank >= ranks[token]:
            return None  # no pair of parts makes it: reached as a whole word only
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts[0], parts[1]


def _special_tokens() -> list[str]:
    numbers = iter(range(_NUM_SPECIAL))
    return [_NAMED_SPECIAL.get(place) or f"<|reserved_special_token_{next(numbers)}|>" for place in range(_NUM_SPECIAL)]
