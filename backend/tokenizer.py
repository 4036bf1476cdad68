"""Text to token ids: the model's own tokenizer.json behind the few calls that the front end needs."""

import json
import threading
from collections import OrderedDict
from functools import cached_property
from typing import Any

import tokenizers

from limpet.backend.checkpoint import CheckpointDir, CheckpointError, TokenizerConfig

_CACHED_CHARS = 4_000_000  # text kept by the cache of template segments


def _describe(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """tokenizer.json without its bulk."""
    description: dict[str, Any] = json.loads(tokenizer.to_str())
    for bulk in ("vocab", "merges"):
        description["model"].pop(bulk, None)
    return description


def _keeps_length(normalizer: dict[str, Any] | None) -> bool:
    """Whether normalised text is never shorter than the original (in bytes)."""
    if normalizer is None or normalizer["type"] == "Prepend":
        return True
    if normalizer["type"] == "Sequence":
        return all(_keeps_length(part) for part in normalizer["normalizers"])
    return bool(normalizer["type"] == "Replace" and normalizer["pattern"] == {"String": " "} and normalizer["content"])


class Tokenizer:
    """Encodes prompts and template segments; safe to share between threads."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
        self.backend = tokenizer
        self.config = config
        self.description = _describe(tokenizer)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_id: int | None = tokenizer.token_to_id(config.bos_token) if config.bos_token else None
        self._segments: OrderedDict[str, list[int]] = OrderedDict()
        self._cached_chars = 0
        self._lock = threading.Lock()

    @classmethod
    def load(cls, checkpoint: CheckpointDir) -> "Tokenizer":
        """Raises CheckpointError if the checkpoint's tokenizer is missing or damaged."""
        config = checkpoint.tokenizer_config()
        try:
            backend = tokenizers.Tokenizer.from_file(str(checkpoint.tokenizer_path))
        except Exception as error:  # the library has no class of its own
            reason = f"{checkpoint.tokenizer_path.name} cannot be read ({error}): convert the model again."
            raise CheckpointError(reason) from error
        return cls(backend, config)

    @cached_property
    def adds_bos(self) -> bool:
        """Whether a prompt starts with BOS: the checkpoint says so or the tokenizer's post-processor adds it."""
        if self.bos_id is None:
            return False
        return self.config.add_bos or self.backend.encode("a", add_special_tokens=True).ids[:1] == [self.bos_id]

    @cached_property
    def longest_token_bytes(self) -> int | None:
        """No token stands for more bytes of text than this; None if the tokenizer sets no such bound."""
        model = self.description["model"]
        swallows_spaces = any(token["lstrip"] or token["rstrip"] for token in self.description["added_tokens"])
        fuses_unknown = model.get("unk_token") is not None and not model.get("byte_fallback", False)
        if swallows_spaces or fuses_unknown or not _keeps_length(self.description["normalizer"]):
            return None
        return max(len(token.encode()) for token in self.backend.get_vocab(with_added_tokens=True))

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt, with exactly one BOS where the model wants one."""
        return self.with_bos(self._encode(text))

    def encode_segment(self, text: str) -> list[int]:
        """Ids of a piece inside a context, nothing added; remembered, since a conversation renders it every turn."""
        with self._lock:
            if text in self._segments:
                self._segments.move_to_end(text)
                return self._segments[text]
        ids = self._encode(text)
        self._remember(text, ids)
        return ids

    def tokens_before(self, text: str, position: int) -> int:
        """How many tokens of `text` start before character `position`."""
        offsets = self.backend.encode(text, add_special_tokens=False).offsets
        return sum(start < position for start, _ in offsets)

    def with_bos(self, ids: list[int]) -> list[int]:
        """The same ids, beginning with BOS if the model wants one."""
        if self.bos_id is None or not self.adds_bos or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    def decode(self, ids: list[int]) -> str:
        """Text of whole answers; streams use a Detokenizer."""
        text: str = self.backend.decode(ids, skip_special_tokens=True)
        return text

    def decoded_token(self, token_id: int) -> str:
        """The text of one token by itself, special ones included."""
        text: str = self.backend.decode([token_id], skip_special_tokens=False)
        return text

    def special_id(self, text: str) -> int | None:
        """The special token written exactly like `text`."""
        token_id: int | None = self.backend.token_to_id(text)
        return token_id if token_id in self.special_ids else None

    def token_text(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it; None outside the vocabulary."""
        token: str | None = self.backend.id_to_token(token_id)
        return token

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def _remember(self, text: str, ids: list[int]) -> None:
        with self._lock:
            if text not in self._segments:
                self._cached_chars += len(text)
            self._segments[text] = ids
            while self._cached_chars > _CACHED_CHARS:
                dropped, _ = self._segments.popitem(last=False)
                self._cached_chars -= len(dropped)
