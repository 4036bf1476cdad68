"""What every kind of source comes down to: numbers, tensors to read one at a time, a layout, a tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from tokenizers import Tokenizer

from limpet.backend.checkpoint import ModelConfig, TokenizerConfig
from limpet.converter.rules import Layout, TensorInfo


class TensorStore(Protocol):
    """The tensors of a source, described at once and read one at a time."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> torch.Tensor: ...

    def file_of(self, name: str) -> Path | None:
        """The safetensors file that holds the tensor as it is, if it is one."""
        ...


@dataclass(frozen=True)
class SourceTokenizer:
    """A tokenizer as the source defines it; `chat_template` None means raw mode."""

    tokenizer: Tokenizer
    config: TokenizerConfig
    chat_template: str | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Source:
    """One opened checkpoint. `config.dtype` is the type that `--dtype auto` writes; its end ids are the tokenizer's."""

    kind: str  # for people, e.g. "GGUF file, Q4_1"
    name: str  # the model's name unless the user gives one
    config: ModelConfig
    layout: Layout
    store: TensorStore
    tokenizer: SourceTokenizer
    warnings: tuple[str, ...] = ()
