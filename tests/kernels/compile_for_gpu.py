"""Compiles every kernel for an H200 on a machine without a GPU: `python -m tests.kernels.compile_for_gpu`.

The interpreter runs kernels that the compiler refuses. A driver that has no device lets Triton compile, and launching
ends there. Prints a line a kernel: its name and the shared memory it needs.
"""

from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from limpet.kernels import launchers
from limpet.kernels.sum_and_norm import MAX_PROGRAMS, Mailboxes, sum_and_norm

NUM_TOKENS, NUM_HEADS, BLOCK_SIZE = 5, 16, 64


class NoDevice:
    """What compiling asks of a driver."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_all(dtype: torch.dtype = torch.bfloat16) -> None:
    """Call every launcher, with Llama's and DeepSeek-V2-Lite's sizes."""
    _attend_like_llama(dtype)
    _attend_like_deepseek(dtype)
    x = torch.zeros(NUM_TOKENS, 2048, dtype=dtype)
    launchers.rms_norm(x, x[0], 1e-6)
    launchers.rms_norm(x, x[0], 1e-6, residual=x.clone())
    numbers = torch.zeros(MAX_PROGRAMS, dtype=torch.int64)
    sum_and_norm(x, x.clone(), x[0], 1e-6, Mailboxes(1, 4, x.numel(), numbers[:4], numbers[:4], numbers.int()))
    launchers.silu_and_mul(x)
    launchers.linear(x, torch.zeros(512, 2048, dtype=dtype), x[0, :512], fixed_order=True)
    logits, numbers = torch.zeros(NUM_TOKENS, 32000, dtype=dtype), torch.zeros(NUM_TOKENS)
    ids = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    for draws, filters in ((False, False), (True, False), (True, True)):
        launchers.sample(logits, ids, ids, numbers, ids, numbers, numbers, ids, draws, filters)
    router, gate_up, down = (
        torch.zeros(shape, dtype=dtype) for shape in ((64, 2048), (66, 2816, 2048), (66, 2048, 1408))
    )
    for count, groups, kept, normalizes, fixed in (
        (1, 1, 1, False, False),
        (5, 1, 1, False, False),
        (5, 8, 3, True, True),
    ):
        launchers.mix_experts(x[:count], router, gate_up, down, 6, groups, kept, 1.0, normalizes, fixed_order=fixed)


def _attend_like_llama(dtype: torch.dtype) -> None:
    heads = torch.zeros(NUM_TOKENS, 3 * NUM_HEADS, 128, dtype=dtype)
    caches = [torch.zeros(3, BLOCK_SIZE, NUM_HEADS, 128, dtype=dtype) for _ in range(2)]
    angles = torch.zeros(NUM_TOKENS, 64)
    launchers.apply_rotary(heads, angles, angles)
    launchers.rotate_and_store(heads, angles, angles, *caches, torch.zeros(NUM_TOKENS, dtype=torch.int64))
    _attend_paged(heads[:, :NUM_HEADS], caches[0], caches[1])


def _attend_like_deepseek(dtype: torch.dtype) -> None:
    q, angles = torch.zeros(NUM_TOKENS, NUM_HEADS, 192, dtype=dtype), torch.zeros(NUM_TOKENS, 32)
    absorbed, out = (torch.zeros(NUM_TOKENS, NUM_HEADS, size, dtype=dtype) for size in (576, 128))
    cache = torch.zeros(3, BLOCK_SIZE, 576, dtype=dtype)
    rows, w_uk = torch.zeros(NUM_TOKENS, 576, dtype=dtype), torch.zeros(NUM_HEADS, 128, 512, dtype=dtype)
    launchers.store_latents(
        rows, rows[0, :512], 1e-6, angles, angles, cache, torch.zeros(NUM_TOKENS, dtype=torch.int64)
    )
    launchers.absorb_queries(q, w_uk, angles, angles, absorbed)
    launchers.multiply_heads(absorbed[..., :512], w_uk.transpose(1, 2), out)
    tables, kv_lens = _sequences()
    for num_heads in (NUM_HEADS, 128):
        wide = torch.zeros(NUM_TOKENS, num_heads, 576, dtype=dtype)
        launchers.latent_decode_attention(wide, cache, tables, kv_lens, 512, 0.1)
    _attend_paged(absorbed, cache.unsqueeze(2), cache.unsqueeze(2)[..., :512])
    lens, k = torch.tensor([0, NUM_TOKENS], dtype=torch.int32), torch.zeros(NUM_TOKENS, NUM_HEADS, 128, dtype=dtype)
    for is_causal in (True, False):
        _, lse = launchers.expanded_attention(q, k, rows[:, 512:], k, lens, lens, NUM_TOKENS, 0.1, is_causal)
    launchers.merge_attention(out, lse, out.clone(), lse.clone())


def _attend_paged(q: Tensor, keys: Tensor, values: Tensor) -> None:
    tables, kv_lens = _sequences()
    lens = torch.arange(NUM_TOKENS + 1, dtype=torch.int32)
    launchers.decode_attention(q, keys, values, tables, kv_lens, 0.1)
    launchers.fixed_order_decode_attention(q, keys, values, tables, kv_lens, 0.1)
    launchers.prefill_attention(q, keys, values, tables, lens, kv_lens, 1, 0.1)
    launchers.fixed_order_prefill_attention(q, keys, values, tables, lens, kv_lens, 1, 0.1)


def _sequences() -> tuple[Tensor, Tensor]:
    """Block tables of long sequences, and their lengths."""
    return torch.zeros(NUM_TOKENS, 64, dtype=torch.int32), torch.ones(NUM_TOKENS, dtype=torch.int32)


def main() -> None:
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, warmup: bool, **options: Any) -> None:
        compiled = run(kernel, *args, warmup=True, **options)
        print(kernel.fn.__name__, compiled.metadata.shared, flush=True)

    driver.set_active(NoDevice())
    JITFunction.run = compile_only
    compile_all()


if __name__ == "__main__":
    main()
