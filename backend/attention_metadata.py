"""Where a step's tokens stand in the paged cache: built once a step, read by every layer."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """The step's tokens are the decodes (one each), then the prefill chunks one after the other."""

    slots: Tensor  # [num_tokens] block * block_size + offset of each token
    decode_block_tables: Tensor  # [num_decodes, max_blocks]
    decode_kv_lens: list[int]  # cached positions of each decode, its new token included
    prefill_block_tables: Tensor  # [num_prefills, max_blocks]
    prefill_q_lens: list[int]
    prefill_kv_lens: list[int]

    @property
    def num_decodes(self) -> int:
        return len(self.decode_kv_lens)
