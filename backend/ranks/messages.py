"""What rank 0 tells the other ranks, over a socket to each, and what they answer. No torch.

First a rank is told step by step how to start, and answers each with Done or Refused. Then it gets a Step for every
step of the engine, answers none, and sends a Beat every BEAT_S.
"""

from typing import Literal, TypeAlias

import msgspec

from limpet.backend.config import EngineConfig
from limpet.backend.core import RowStart, StepPlan
from limpet.backend.sampling_params import SamplingParams

BEAT_S = 0.5


class Join(msgspec.Struct, frozen=True, tag=True):
    """Connect to the other ranks, which meet at this port."""

    rank: int
    model_dir: str
    config: EngineConfig
    port: int


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load this rank's part of the weights."""


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Answer how many bytes of cache this rank has room for; on a GPU all ranks run their largest step first."""


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Make the cache."""

    num_blocks: int


class Capture(msgspec.Struct, frozen=True, tag=True):
    """Capture CUDA graphs, where there are any; after it come Steps."""


class Step(msgspec.Struct, frozen=True, tag=True):
    """Compute; only rank 0 samples."""

    plan: StepPlan


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End, with exit code 0."""


class Done(msgspec.Struct, frozen=True, tag=True):
    value: int = 0


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Nothing can be served with these settings or this checkpoint."""

    error: Literal["ConfigError", "CheckpointError"]
    message: str


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The rank's process runs."""


Command: TypeAlias = Join | Load | Measure | Allocate | Capture | Step | Stop
Answer: TypeAlias = Done | Refused | Beat

_NOTHING_SAMPLED = SamplingParams()


def step_for_followers(plan: StepPlan) -> Step:
    """The plan without what only the sampler needs."""
    return Step(msgspec.structs.replace(plan, starts=[_start_without_sampling(start) for start in plan.starts]))


def _start_without_sampling(start: RowStart) -> RowStart:
    if start.params.prompt_logprobs is None:
        return RowStart(start.row, _NOTHING_SAMPLED, start.blocks)
    params = SamplingParams(prompt_logprobs=start.params.prompt_logprobs)  # whose logits all ranks compute
    return RowStart(start.row, params, start.blocks, start.tokens, start.num_prompt)
