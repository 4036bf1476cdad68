"""Cached context of a step's prefill chunks, cut into pieces whose expanded keys and values fit beside everything else.

Built once a step, on the host's numbers, and used by every layer.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from limpet.backend.attention_metadata import AttentionMetadata
from limpet.backend.staging import send

Ints: TypeAlias = npt.NDArray[np.int64]

PIECE_TOKENS = 4096  # of all chunks together


@dataclass(frozen=True)
class ContextPiece:
    """Some of each chunk's cached positions, chunk after chunk."""

    slots: Tensor  # [num_keys] block * block_size + offset
    cu_kv_lens: Tensor  # [num_prefills + 1] int32


@dataclass(frozen=True)
class LatentStep:
    """A step with its context cut into pieces; none where no chunk has context, or nothing is expanded."""

    step: AttentionMetadata
    pieces: list[ContextPiece]
    expands: bool  # prefill chunks attend to keys and values of all heads, else in latent space as decodes do


def cut_context(step: AttentionMetadata, context_lens: list[int], block_size: int) -> list[ContextPiece]:
    """Pieces of at most PIECE_TOKENS keys, or of one key for every chunk that still has some."""
    lengths = np.array(context_lens, dtype=np.int64)
    each = max(1, PIECE_TOKENS // max(1, int((lengths > 0).sum())))
    return [
        _piece(step, np.full_like(lengths, first).clip(max=lengths), (lengths - first).clip(0, each), block_size)
        for first in range(0, int(lengths.max(initial=0)), each)
    ]


def _piece(step: AttentionMetadata, firsts: Ints, counts: Ints, block_size: int) -> ContextPiece:
    ends = np.cumsum(counts)
    chunks = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(int(ends[-1])) + np.repeat(firsts - ends + counts, counts)
    cu_kv_lens = np.concatenate(([0], ends)).astype(np.int32)
    places, offsets, cu_kv_lens_ = send(
        [chunks * step.prefill_block_tables.shape[1] + positions // block_size, positions % block_size, cu_kv_lens],
        step.slots.device,
    )
    blocks = step.prefill_block_tables.reshape(-1)[places].to(torch.int64)
    return ContextPiece(blocks * block_size + offsets, cu_kv_lens_)
