"""The bandwidth floor of a decode step: the bytes that it must read, at the rate at which this GPU copies."""

from math import prod
from statistics import median

import torch

from limpet.backend.checkpoint import ModelConfig
from limpet.converter.targets import target_shapes

COPIED_BYTES = 1 << 30


def step_bytes(config: ModelConfig, batch: int, kv_len: int, itemsize: int = 2) -> float:
    """Bytes of the weights and of the cache that `batch` sequences of `kv_len` positions read.

    Of routed experts it is those that so many tokens touch on average, chosen evenly.
    """
    shapes = target_shapes(config)
    unread = 0 if config.tie_word_embeddings else prod(shapes["embed_tokens.weight"])
    elements: float = sum(prod(shape) for shape in shapes.values()) - unread
    if config.experts is not None:
        stacked = sum(prod(shape) for name, shape in shapes.items() if ".experts_" in name)
        num_routed, num_all = config.experts.num_experts, config.experts.num_experts + config.experts.num_shared_experts
        untouched = (1 - config.experts.num_experts_per_token / num_routed) ** batch
        elements -= stacked * num_routed / num_all * untouched
    row = 2 * config.num_kv_heads * config.head_dim
    if config.latent_attention is not None:
        row = config.latent_attention.row_dim
    return itemsize * (elements + batch * kv_len * config.num_layers * row)


def copy_rate() -> float:
    """Bytes a second that a large copy reads and writes."""
    source, target = (torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    times: list[float] = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * COPIED_BYTES / median(times[1:])
