"""The requests that every engine is measured with: the same arguments give the same requests on every machine.

`digest()` goes with every result: two results are comparable only if their digests are equal. Random numbers come from
PCG64's 53-bit uniforms, normal ones from a Box-Muller transform written out here, since numpy may change the streams
of Generator.lognormal() and integers() between versions.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FIRST_ID = 10  # leaves out begin, end and padding ids at the start of common vocabularies
SEED = 20241130
MIN_LENGTH, MAX_LENGTH = 4, 1024

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Request:
    """One prompt and how many tokens to generate, end ids ignored; a cached prefix serves equal salts only."""

    prompt: list[int]
    num_output_tokens: int
    cache_salt: str = ""


def sharegpt(
    vocab_size: int, num_requests: int = 1000, input_tokens: int = 236_000, output_tokens: int = 215_000
) -> list[Request]:
    """Requests whose lengths are log-normal (medians 100 and 150, sigmas 1.5 and 1) and sum to the given totals.

    The totals are those of public reports on 1000 requests of ShareGPT; the single lengths are synthetic.
    """
    prompt_lengths = _lengths(_generator(1), num_requests, 100.0, 1.5, input_tokens)
    output_lengths = _lengths(_generator(2), num_requests, 150.0, 1.0, output_tokens)
    generator = _generator(3)
    return [
        Request(_random_ids(generator, int(prompt), vocab_size), int(output))
        for prompt, output in zip(prompt_lengths, output_lengths, strict=True)
    ]


def uniform(
    vocab_size: int, num_requests: int, prompt_tokens: int, output_tokens: int, repeat: int = 0
) -> list[Request]:
    """Requests of one shape; another `repeat` gives other ids."""
    generator = _generator(1000 + 97 * num_requests + 7 * prompt_tokens + 1_000_003 * repeat)
    return [Request(_random_ids(generator, prompt_tokens, vocab_size), output_tokens) for _ in range(num_requests)]


def warm_up(requests: list[Request]) -> list[Request]:
    """The same prompts with answers of 64 tokens at most: every shape of a step, in a fraction of the time."""
    return [Request(each.prompt, min(each.num_output_tokens, 64)) for each in requests]


def arrival_times(num_requests: int, rate: float) -> list[float]:
    """Seconds after the start at which requests arrive at random (Poisson), `rate` a second on average."""
    gaps = -np.log(1.0 - _generator(4).random(num_requests)) / rate
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def totals(requests: list[Request]) -> tuple[int, int]:
    """Input and output tokens of all requests."""
    return sum(len(each.prompt) for each in requests), sum(each.num_output_tokens for each in requests)


def digest(requests: list[Request]) -> str:
    """Twelve hexadecimal digits of SHA-256 over lengths and ids as little-endian int64."""
    state = hashlib.sha256()
    for each in requests:
        state.update(np.asarray([len(each.prompt), each.num_output_tokens, *each.prompt], dtype="<i8").tobytes())
    return state.hexdigest()[:12]


def _generator(stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([SEED, stream])))


def _random_ids(generator: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    """Ids from [FIRST_ID, vocab_size): no two prompts share a prefix worth caching."""
    ids: list[int] = (FIRST_ID + np.floor(generator.random(count) * (vocab_size - FIRST_ID)).astype(np.int64)).tolist()
    return ids


def _lengths(generator: np.random.Generator, count: int, median: float, sigma: float, total: int) -> _Ints:
    """Log-normal lengths, scaled by one factor and clipped so that they sum to `total` exactly."""
    if not count * MIN_LENGTH <= total <= count * MAX_LENGTH:
        raise ValueError(f"{count} lengths of {MIN_LENGTH} to {MAX_LENGTH} tokens cannot sum to {total}.")
    unscaled = np.exp(np.log(median) + sigma * _normal(generator, count))
    lengths = _clipped(unscaled, _largest_scale_below(unscaled, total))
    _spread(lengths, total - int(lengths.sum()))
    return lengths


def _normal(generator: np.random.Generator, count: int) -> _Floats:
    """Standard normal numbers by Box and Muller's transform."""
    radius = np.sqrt(-2.0 * np.log(1.0 - generator.random(count)))
    return np.asarray(radius * np.cos(2.0 * np.pi * generator.random(count)), dtype=np.float64)


def _clipped(unscaled: _Floats, scale: float) -> _Ints:
    lengths: _Ints = np.clip(np.rint(unscaled * scale), MIN_LENGTH, MAX_LENGTH).astype(np.int64)
    return lengths


def _largest_scale_below(unscaled: _Floats, total: int) -> float:
    """By bisection (of exponents), the scale at which the clipped lengths still sum to less than `total`."""
    low, high = 1e-6, 1e6
    for _ in range(200):
        middle = float((low * high) ** 0.5)
        if _clipped(unscaled, middle).sum() < total:
            low = middle
        else:
            high = middle
    return low


def _spread(lengths: _Ints, remainder: int) -> None:
    """Add one to the first `remainder` lengths that are at no bound, round after round."""
    place = 0
    while remainder > 0:
        if MIN_LENGTH < lengths[place % len(lengths)] < MAX_LENGTH:
            lengths[place % len(lengths)] += 1
            remainder -= 1
        place += 1
