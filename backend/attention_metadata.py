"""Where a step's tokens stand in the paged cache: built once a step, read by every layer."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """The step's tokens are the decodes (one each), then the prefill chunks one after the other."""

    slots: Tensor  # [num_tokens] block * block_size + offset of each token
    decode_block_tables: Tensor  # [num_decodes, max_blocks] int32
    decode_kv_lens: Tensor  # [num_decodes] int32, cached positions of each decode, its new token included
    prefill_block_tables: Tensor  # [num_prefills, max_blocks] int32
    prefill_kv_lens: Tensor  # [num_prefills] int32
    cu_q_lens: Tensor  # [num_prefills + 1] int32, where each chunk begins among the prefill tokens
    chunk_starts: Tensor  # [num_prefills + 1] int32, where each chunk begins among all tokens
    max_q_len: int  # at least the longest chunk; 0: no prefills
    prefill_context_lens: list[int] | None  # [num_prefills] positions before each chunk; None in a captured step

    @property
    def num_decodes(self) -> int:
        return self.decode_kv_lens.shape[0]
