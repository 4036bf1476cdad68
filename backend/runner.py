"""Runs the planned steps on the device: forward pass, sampling, block copies.

Steps run strictly one after the other on a thread of their own. `forward` and `sample` only queue work, so that the
engine plans the next step, and talks to its front ends, while this one runs.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.backend.checkpoint import ModelConfig
from limpet.backend.core import StepPlan
from limpet.backend.input_batch import InputBatch, StepInputs
from limpet.backend.models.llama import LlamaForCausalLM
from limpet.backend.sampler import sample


@dataclass(frozen=True)
class ForwardHandle:
    """A queued forward pass."""

    result: "Future[tuple[StepInputs, Tensor]]"  # inputs, logits of the sampled rows


class Runner:
    """One model with its cache of `num_blocks` blocks of `block_size` tokens and `num_rows` rows."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        num_rows: int,
        session_len: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self._caches = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(config.num_layers)
        ]
        self._model = model
        self._batch = InputBatch(num_rows, -(-session_len // block_size), block_size, device)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="limpet-runner")

    def forward(self, plan: StepPlan) -> ForwardHandle:
        return ForwardHandle(self._worker.submit(self._forward, plan))

    def sample(self, handle: ForwardHandle, on_ready: Callable[[], None] | None = None) -> "Future[list[int]]":
        """The ids of the plan's sampling rows, in the plan's order; `on_ready` is called when they are there."""
        ids = self._worker.submit(self._sample, handle)
        if on_ready is not None:
            ids.add_done_callback(lambda _: on_ready())
        return ids

    def close(self) -> None:
        self._worker.shutdown(wait=True)

    @torch.inference_mode()
    def _forward(self, plan: StepPlan) -> tuple[StepInputs, Tensor]:
        for source, destination in plan.copies:
            for keys, values in self._caches:
                keys[destination] = keys[source]
                values[destination] = values[source]
        self._batch.apply(plan)
        inputs = self._batch.inputs(plan)
        hidden = self._model(inputs.ids, inputs.positions, self._caches, inputs.attention)
        return inputs, self._model.logits(hidden[inputs.sampled_tokens])

    @torch.inference_mode()
    def _sample(self, handle: ForwardHandle) -> list[int]:
        inputs, logits = handle.result.result()
        if not inputs.sampled_rows:
            return []
        ids = sample(logits, inputs.sampled_rows, inputs.sampled_positions, self._batch.sampling)
        self._batch.last_ids[inputs.sampled_rows] = ids.clamp(min=0)
        values: list[int] = ids.tolist()
        return values
