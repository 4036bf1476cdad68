"""The second half of an attention that was split over several programs.

With a split's normalised output o_i and the logarithm (base 2) of its softmax's denominator e_i the whole's output is
o = sum_i 2^(e_i - e) o_i with e = log2 sum_i 2^e_i.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_splits", "whole_len"], do_not_specialize_on_alignment=["kv_lens_ptr"])
def _merge_splits_kernel(
    partial_ptr,  # [num_seqs, num_heads, num_splits, HEAD_DIM_V] float32
    lse_ptr,  # [num_seqs, num_heads, num_splits]
    out_ptr,
    kv_lens_ptr,  # None: all sequences were split
    num_splits,
    whole_len,
    out_stride_seq,
    out_stride_head,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if kv_lens_ptr is not None:  # noqa: SIM102 - decided when compiling
        if tl.load(kv_lens_ptr + seq) <= whole_len:
            return
    splits, columns = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_V)
    first = (seq * tl.num_programs(1) + head) * num_splits
    lse = tl.load(lse_ptr + first + splits, mask=splits < num_splits, other=float("-inf"))
    weights = tl.exp2(lse - tl.max(lse, axis=0))
    written = lse > float("-inf")  # an empty split left its output unwritten
    mask = written[:, None] & (columns < HEAD_DIM_V)[None, :]
    partial = tl.load(partial_ptr + ((first + splits) * HEAD_DIM_V)[:, None] + columns[None, :], mask=mask, other=0.0)
    y = tl.sum(partial * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    out_ptrs = out_ptr + seq * out_stride_seq + head * out_stride_head + columns
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=columns < HEAD_DIM_V)


def merge_splits(partial: Tensor, lse: Tensor, out: Tensor, kv_lens: Tensor | None = None, whole_len: int = 0) -> None:
    """Write what partial [num_seqs, num_heads, num_splits, head_dim_v] and lse [num_seqs, num_heads, num_splits] make.

    Both are float32 and contiguous; a split with nothing in it has lse minus infinity, and each sequence has one with
    something. out [num_seqs, num_heads, head_dim_v]; with kv_lens [num_seqs] sequences of at most `whole_len` positions
    were not split, and are left as they are.
    """
    num_seqs, num_heads, num_splits, head_dim_v = partial.shape
    _merge_splits_kernel[(num_seqs, num_heads)](
        partial,
        lse,
        out,
        kv_lens,
        num_splits,
        whole_len,
        out.stride(0),
        out.stride(1),
        HEAD_DIM_V=head_dim_v,
        BLOCK_V=triton.next_power_of_2(head_dim_v),
        BLOCK_SPLITS=triton.next_power_of_2(num_splits),
        num_warps=4,
    )
