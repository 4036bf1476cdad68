"""The next id of every row: argmax, or a seeded draw after temperature, top-k, top-p and min-p, in that order.

A draw is argmax(logits / temperature + g) with Gumbel noise g, a hash of (seed, position, id): the same distribution as
softmax, the same ids on any row, in any company, on any device.

Each of the three filters keeps the first ids of the order "larger logit first, then smaller id", so all that survives
them is one prefix of it, described by its last entry: a threshold and, among the ids of exactly that logit (common in
bfloat16), the largest one kept. It is found without sorting, by bisection over the 2^32 bit patterns of a float.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from limpet.kernels.checks import require

INVALID_ID = -1
BLOCK_VOCAB = 4096
BLOCK_FILTER = 8192

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # step of splitmix64 (Steele et al. 2014)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_INVALID_ID = tl.constexpr(INVALID_ID)
_MANTISSA = tl.constexpr(0x7FFFFFFF)
_LOWEST_KEY = tl.constexpr(-2139095041)  # of minus infinity


@triton.jit
def _mix(x):
    """splitmix64's finalizer for uint64."""
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _gumbel_noise(key, ids):
    """-log(-log(u)) for uniforms u of 23 bits; `key` is the hash of (seed, position)."""
    bits = (_mix(key + ids.to(tl.uint64) * _GOLDEN) & 0x7FFFFF).to(tl.int32)
    u = (bits.to(tl.float32) + 0.5) * 0.00000011920928955078125  # 2^-23
    # The GPU's logarithm is exact to 2^-22 absolutely: too little near 1, where the draws that win come from.
    v = (8388607 - bits).to(tl.float32) * 0.00000011920928955078125 + 0.000000059604644775390625  # 1 - u, exact
    series = v * (1 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * (0.2 + v * 0.16666667)))))
    exponential = tl.where(v < 0.03125, series, -tl.log(u))  # -log(u)
    return -tl.log(exponential)


@triton.jit
def _draw_kernel(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    temperature_ptr,
    seed_ptr,
    thresholds_ptr,
    last_ties_ptr,
    best_values_ptr,  # [num_rows, chunks]
    best_ids_ptr,
    vocab_size,
    logits_stride,
    DRAWS: tl.constexpr,
    FILTERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    in_vocab = ids < vocab_size
    logits = tl.load(logits_ptr + index * logits_stride + ids, mask=in_vocab, other=float("-inf")).to(tl.float32)
    is_broken = tl.max(((logits != logits) | (logits == float("inf"))).to(tl.int32), axis=0) > 0
    if DRAWS:
        row = tl.load(rows_ptr + index)
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            if FILTERS:
                threshold, last_tie = tl.load(thresholds_ptr + index), tl.load(last_ties_ptr + index)
                kept = (logits > threshold) | ((logits == threshold) & (ids <= last_tie))
                logits = tl.where(kept, logits, float("-inf"))
            position = tl.load(positions_ptr + index).to(tl.uint64)
            key = _mix(tl.load(seed_ptr + row).to(tl.uint64) + _mix(position * _GOLDEN + _GOLDEN))
            logits = logits / temperature + _gumbel_noise(key, ids)
    best, place = tl.max(logits, axis=0, return_indices=True, return_indices_tie_break_left=True)
    best_id = tl.where(is_broken, _INVALID_ID, chunk * BLOCK + place)
    out = index * tl.num_programs(1) + chunk
    tl.store(best_values_ptr + out, tl.where(is_broken, float("inf"), best))
    tl.store(best_ids_ptr + out, best_id)


@triton.jit
def _best_chunk_kernel(best_values_ptr, best_ids_ptr, out_ptr, num_chunks, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, BLOCK)
    mask = chunks < num_chunks
    values = tl.load(best_values_ptr + index * num_chunks + chunks, mask=mask, other=float("-inf"))
    ids = tl.load(best_ids_ptr + index * num_chunks + chunks, mask=mask, other=0)
    best = tl.max(values, axis=0)
    first_best = tl.min(tl.where(values == best, ids, 2147483647), axis=0)
    is_broken = (best == float("-inf")) | (tl.min(ids, axis=0) == _INVALID_ID)
    tl.store(out_ptr + index, tl.where(is_broken, _INVALID_ID, first_best).to(tl.int64))


@triton.jit
def _load_logits(row_ptr, start, vocab_size, BLOCK: tl.constexpr):
    """A tile of a row in float32, minus infinity past its end; -0 becomes 0, which is the same logit."""
    ids = start + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(logits == 0, 0.0, logits)


@triton.jit
def _sort_key(x):
    """int32 that orders like the float32 x."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _MANTISSA)


@triton.jit
def _value_of_key(key):
    return (key ^ ((key >> 31) & _MANTISSA)).to(tl.float32, bitcast=True)


@triton.jit
def _count_from(row_ptr, key, vocab_size, BLOCK: tl.constexpr):
    """How many logits have `key` or a larger one."""
    count = 0
    for start in range(0, vocab_size, BLOCK):
        logits = _load_logits(row_ptr, start, vocab_size, BLOCK)
        count += tl.sum((_sort_key(logits) >= key).to(tl.int32), axis=0)
    return count


@triton.jit
def _mass_from(row_ptr, key, peak, temperature, vocab_size, BLOCK: tl.constexpr):
    """Sum of exp((logit - peak) / temperature) over the logits that have `key` or a larger one."""
    mass = 0.0
    for start in range(0, vocab_size, BLOCK):
        logits = _load_logits(row_ptr, start, vocab_size, BLOCK)
        mass += tl.sum(tl.where(_sort_key(logits) >= key, tl.exp((logits - peak) / temperature), 0.0), axis=0)
    return mass


@triton.jit
def _id_of_tie(row_ptr, value, number, vocab_size, BLOCK: tl.constexpr):
    """The id of the `number`-th logit that equals `value`; vocab_size if there are not so many."""
    seen = 0
    found = vocab_size
    for start in range(0, vocab_size, BLOCK):
        ties = (_load_logits(row_ptr, start, vocab_size, BLOCK) == value).to(tl.int32)
        ranks = seen + tl.cumsum(ties, axis=0)
        ids = start + tl.arange(0, BLOCK)
        found = min(found, tl.min(tl.where((ties > 0) & (ranks == number), ids, vocab_size), axis=0))
        seen += tl.sum(ties, axis=0)
    return found


@triton.jit
def _top_k_bound(row_ptr, top_k, past_peak, vocab_size, BLOCK: tl.constexpr):
    """The key of the top_k-th logit, and how many logits of exactly that key belong to the first top_k."""
    low, high = tl.full((), _LOWEST_KEY, tl.int64), past_peak
    while high - low > 1:
        middle = (low + high) >> 1
        if _count_from(row_ptr, middle, vocab_size, BLOCK) >= top_k:
            low = middle
        else:
            high = middle
    return low, (top_k - _count_from(row_ptr, low + 1, vocab_size, BLOCK)).to(tl.int32)


@triton.jit
def _top_p_bound(row_ptr, low, wanted, peak, past_peak, temperature, vocab_size, BLOCK: tl.constexpr):
    """The key, at least `low`, at which the mass from the peak down is `wanted`, and how many ties that takes."""
    high = past_peak
    while high - low > 1:
        middle = (low + high) >> 1
        if _mass_from(row_ptr, middle, peak, temperature, vocab_size, BLOCK) >= wanted:
            low = middle
        else:
            high = middle
    missing = wanted - _mass_from(row_ptr, low + 1, peak, temperature, vocab_size, BLOCK)
    each = tl.exp((_value_of_key(low.to(tl.int32)) - peak) / temperature)
    return low, tl.minimum(tl.maximum(tl.ceil(missing / each), 1.0), vocab_size * 1.0).to(tl.int32)


@triton.jit
def _filter_row(row_ptr, peak, temperature, top_k, top_p, min_p, vocab_size, BLOCK: tl.constexpr):
    """The threshold and the last tie of what the filters keep."""
    past_peak = _sort_key(peak).to(tl.int64) + 1
    key, num_ties = tl.full((), _LOWEST_KEY, tl.int64), vocab_size
    if (top_k > 0) & (top_k < vocab_size):
        key, num_ties = _top_k_bound(row_ptr, top_k, past_peak, vocab_size, BLOCK)
    if top_p < 1:
        each = tl.exp((_value_of_key(key.to(tl.int32)) - peak) / temperature)
        mass = _mass_from(row_ptr, key + 1, peak, temperature, vocab_size, BLOCK) + num_ties * each
        last, fitting = _top_p_bound(row_ptr, key, top_p * mass, peak, past_peak, temperature, vocab_size, BLOCK)
        num_ties = tl.where(last > key, fitting, min(num_ties, fitting))
        key = last
    threshold, last_tie = _value_of_key(key.to(tl.int32)), vocab_size
    if num_ties < vocab_size:
        last_tie = _id_of_tie(row_ptr, threshold, num_ties, vocab_size, BLOCK)
    if min_p > 0:
        least = peak + temperature * tl.log(min_p)
        last_tie = tl.where(least > threshold, vocab_size, last_tie)
        threshold = tl.maximum(least, threshold)
    return threshold, last_tie


@triton.jit
def _filter_kernel(
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    thresholds_ptr,
    last_ties_ptr,
    vocab_size,
    logits_stride,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    threshold, last_tie = float("-inf"), vocab_size
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        row_ptr = logits_ptr + index * logits_stride
        peak = float("-inf")
        for start in range(0, vocab_size, BLOCK):
            peak = max(peak, tl.max(_load_logits(row_ptr, start, vocab_size, BLOCK), axis=0))
        if (peak > float("-inf")) & (peak < float("inf")):
            threshold, last_tie = _filter_row(row_ptr, peak, temperature, top_k, top_p, min_p, vocab_size, BLOCK)
    tl.store(thresholds_ptr + index, threshold)
    tl.store(last_ties_ptr + index, last_tie)


def sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    draws: bool,
    filters: bool,
    out: Tensor | None = None,
) -> Tensor:
    """The next ids [num_sampled] int64 for logits [num_sampled, vocab]; INVALID_ID where a row's are not finite.

    `rows[i]` is where the settings of logits[i] stand in temperature (0: argmax), top_k (0: off), top_p, min_p and seed
    [num_rows]; positions[i] is where the new id will stand in its sequence. `draws`: some row's temperature is not 0;
    `filters`: some such row has a top-k, top-p or min-p.
    """
    num_sampled, vocab_size = logits.shape
    out = rows.new_empty(num_sampled) if out is None else out
    require(rows.shape == positions.shape == out.shape == (num_sampled,), "every row of logits has its settings")
    require(logits.stride(1) == 1 and rows.is_contiguous() and positions.is_contiguous(), "rows are contiguous")
    bounds: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
    if draws and filters:
        bounds = find_bounds(logits, rows, temperature, top_k, top_p, min_p)
    block = min(BLOCK_VOCAB, triton.next_power_of_2(vocab_size))
    num_chunks = triton.cdiv(vocab_size, block)
    best_values = logits.new_empty((num_sampled, num_chunks), dtype=torch.float32)
    best_ids = logits.new_empty((num_sampled, num_chunks), dtype=torch.int32)
    _draw_kernel[(num_sampled, num_chunks)](
        logits,
        rows,
        positions,
        temperature,
        seed,
        *bounds,
        best_values,
        best_ids,
        vocab_size,
        logits.stride(0),
        DRAWS=draws,
        FILTERS=draws and filters,
        BLOCK=block,
        num_warps=8,
    )
    _best_chunk_kernel[(num_sampled,)](
        best_values, best_ids, out, num_chunks, BLOCK=triton.next_power_of_2(num_chunks), num_warps=1
    )
    return out


def find_bounds(
    logits: Tensor, rows: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """What the filters keep of each row: logits above thresholds [num_sampled], and those equal to it up to the id
    last_ties [num_sampled] int32. Arguments as those of `sample`."""
    num_sampled, vocab_size = logits.shape
    thresholds = logits.new_empty(num_sampled, dtype=torch.float32)
    last_ties = logits.new_empty(num_sampled, dtype=torch.int32)
    _filter_kernel[(num_sampled,)](
        logits,
        rows,
        temperature,
        top_k,
        top_p,
        min_p,
        thresholds,
        last_ties,
        vocab_size,
        logits.stride(0),
        BLOCK=min(BLOCK_FILTER, triton.next_power_of_2(vocab_size)),
        num_warps=8,
    )
    return thresholds, last_ties
