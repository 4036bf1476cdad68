"""Token ids to text as they arrive: cost proportional to the new tokens, never half a character.

Each stream's deltas, joined, equal `decode(ids, skip_special_tokens=True)` of the tokenizers library. Three ways,
chosen from tokenizer.json's decoder:

- ByteLevel: a token is a fixed string of bytes; an incremental UTF-8 decoder joins them. Exact.
- Replace / ByteFallback / Fuse / Strip (SentencePiece): a token is a fixed string, `<0xNN>` a byte. Exact but for one
  case: a run of byte tokens that turns out to be invalid UTF-8 is all U+FFFD in decode(), while a stream has already
  shown the valid characters at its beginning.
- anything else: decode a short window with and without the new token and show the difference.
"""

import codecs
import re
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from limpet.backend.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER_TOKENS = 4  # a UTF-8 character has at most four bytes
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(rest)})
    return table


_ALPHABET = _byte_level_alphabet()


class Detokenizer(ABC):
    """One answer's text so far, with the count of characters after each token."""

    def __init__(self) -> None:
        self.num_chars = 0  # characters given out
        self._shown: list[int] = []  # [num_tokens] characters given out when that token had come
        self._ends: list[int] = []  # [num_tokens] characters at which all of that token's text is out

    def feed(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        pieces = []
        for token_id in ids:
            text, is_partial = self._push(token_id)
            self.num_chars += len(text)
            self._shown.append(self.num_chars)
            self._ends.append(max(self.num_chars + is_partial, self._ends[-1] if self._ends else 0))
            pieces.append(text)
        return "".join(pieces)

    def flush(self) -> str:
        """What an unfinished character at the very end reads as."""
        text = self._flush()
        self.num_chars += len(text)
        return text

    def tokens_covering(self, num_chars: int) -> int:
        """The fewest tokens whose text has at least `num_chars` characters."""
        if num_chars <= 0:
            return 0
        return min(bisect_left(self._shown, num_chars) + 1, len(self._shown))

    def tokens_within(self, num_chars: int) -> int:
        """How many tokens have all of their text within the first `num_chars` characters."""
        return bisect_right(self._ends, num_chars)

    @abstractmethod
    def _push(self, token_id: int) -> tuple[str, bool]:
        """New complete text, and whether a character is left unfinished."""

    @abstractmethod
    def _flush(self) -> str: ...


class ByteLevelDetokenizer(Detokenizer):
    """For tokenizers whose tokens are strings of bytes."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def _push(self, token_id: int) -> tuple[str, bool]:
        text = self._utf8.decode(self._token_bytes(token_id))
        return text, self._utf8.getstate()[0] != b""

    def _flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class SentencePieceDetokenizer(Detokenizer):
    """For tokenizers whose tokens are strings, with single bytes as a fallback."""

    def __init__(self, token_piece: Callable[[int], str | int], strip_char: str, num_strip: int) -> None:
        super().__init__()
        self._token_piece = token_piece
        self._strip_char = strip_char
        self._left_to_strip = num_strip
        self._run = b""  # bytes of an unfinished character

    def _push(self, token_id: int) -> tuple[str, bool]:
        piece = self._token_piece(token_id)
        if isinstance(piece, int):
            return self._strip(self._add_byte(piece)), self._run != b""
        if piece == "":
            return "", self._run != b""
        return self._strip(self._flush() + piece), False

    def _flush(self) -> str:
        broken, self._run = self._run, b""
        return _REPLACEMENT * len(broken)

    def _add_byte(self, byte: int) -> str:
        self._run += bytes([byte])
        try:
            text = self._run.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            return self._flush()
        self._run = b""
        return text

    def _strip(self, text: str) -> str:
        while text and self._left_to_strip:
            if not text.startswith(self._strip_char):
                self._left_to_strip = 0
                break
            text = text[len(self._strip_char) :]
            self._left_to_strip -= 1
        return text


class WindowDetokenizer(Detokenizer):
    """For any other decoder: compares the decoding of a short window before and after each token."""

    def __init__(self, decode: Callable[[list[int]], str], is_shown: Callable[[int], bool]) -> None:
        super().__init__()
        self._decode = decode
        self._is_shown = is_shown
        self._ids: list[int] = []
        self._start = 0  # the window begins here: its text depends on little before it
        self._read = 0  # tokens whose text is out

    def _push(self, token_id: int) -> tuple[str, bool]:
        if not self._is_shown(token_id):
            return "", self._read < len(self._ids)
        self._ids.append(token_id)
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._read < _LONGEST_CHARACTER_TOKENS:
            return "", True
        self._start, self._read = self._read, len(self._ids)
        return text, False

    def _flush(self) -> str:
        text = self._new_text()
        self._read = len(self._ids)
        return text

    def _new_text(self) -> str:
        shown = self._decode(self._ids[self._start : self._read])
        return self._decode(self._ids[self._start :])[len(shown) :]


class DetokenizerFactory:
    """Makes the right Detokenizer for a tokenizer; what a token stands for is worked out once and shared."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._pieces: dict[int, str | int] = {}
        decoder = tokenizer.description["decoder"]
        self._is_byte_level = decoder is not None and decoder["type"] == "ByteLevel"
        self._steps = _sentencepiece_steps(decoder)

    def __call__(self) -> Detokenizer:
        if self._is_byte_level:
            return ByteLevelDetokenizer(self._token_bytes)
        if self._steps is not None:
            strip = self._steps.get("Strip", {"content": " ", "start": 0})
            return SentencePieceDetokenizer(self._token_piece, strip["content"], strip["start"])
        return WindowDetokenizer(self._tokenizer.decode, lambda token_id: self._shown_token(token_id) != "")

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to an answer's text; nothing for special tokens and the embedding's padding."""
        if self._is_byte_level:
            return self._token_bytes(token_id)
        if self._steps is None:
            return self._decoded_inside(token_id).encode()
        piece = self._token_piece(token_id)
        return bytes([piece]) if isinstance(piece, int) else piece.encode()

    def _decoded_inside(self, token_id: int) -> str:
        """A token's text behind another one: at the very start a decoder may drop its space."""
        before = self._tokenizer.encode_segment("a")
        return self._tokenizer.decode([*before, token_id])[len(self._tokenizer.decode(before)) :]

    def _token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            token = self._shown_token(token_id)
            try:
                known = bytes(_ALPHABET[char] for char in token)
            except KeyError:  # an added token is plain text
                known = token.encode()
            self._bytes[token_id] = known
        return known

    def _token_piece(self, token_id: int) -> str | int:
        known = self._pieces.get(token_id)
        if known is None:
            token = self._shown_token(token_id)
            byte = _BYTE_TOKEN.fullmatch(token)
            known = int(byte[1], 16) if byte else self._replaced(token)
            self._pieces[token_id] = known
        return known

    def _replaced(self, token: str) -> str:
        replace = (self._steps or {}).get("Replace")
        return token.replace(replace["pattern"]["String"], replace["content"]) if replace else token

    def _shown_token(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids:
            return ""
        return self._tokenizer.token_text(token_id) or ""  # ids past the vocabulary are padding of the embedding


def _sentencepiece_steps(decoder: dict[str, Any] | None) -> dict[str, Any] | None:
    """The steps of a [Replace,] ByteFallback, Fuse [, Strip] decoder by name; None if it is another one."""
    if decoder is None or decoder["type"] != "Sequence":
        return None
    names = [step["type"] for step in decoder["decoders"]]
    steps = dict(zip(names, decoder["decoders"], strict=True))
    wanted = [name for name in ("Replace", "ByteFallback", "Fuse", "Strip") if name in steps]
    if names != wanted or not {"ByteFallback", "Fuse"} <= set(names):
        return None
    plain = "String" in steps.get("Replace", {"pattern": {"String": ""}})["pattern"]
    return steps if plain and steps.get("Strip", {"stop": 0})["stop"] == 0 else None
