"""Rank 0's runner: what it computes, the other ranks compute with it."""

from collections.abc import Callable
from concurrent.futures import Future

from limpet.backend.core import SampledStep, StepPlan
from limpet.backend.ranks.follower_processes import FollowerProcesses
from limpet.backend.ranks.group import RankGroup
from limpet.backend.ranks.messages import step_for_followers
from limpet.backend.runner import ForwardHandle, Runner
from limpet.backend.token_masks import TokenMasks


class Leader:
    """Takes the place of the `runner` of rank 0 in the engine."""

    def __init__(self, runner: Runner, followers: FollowerProcesses, ranks: RankGroup) -> None:
        self._runner = runner
        self._followers = followers
        self._ranks = ranks

    def forward(self, plan: StepPlan) -> ForwardHandle:
        self._followers.tell(step_for_followers(plan))
        return self._runner.forward(plan)

    def sample(
        self, handle: ForwardHandle, masks: TokenMasks | None = None, on_ready: Callable[[], None] | None = None
    ) -> "Future[SampledStep]":
        sampled = self._runner.sample(handle, masks, on_ready)
        if self._runner.is_on_cuda:
            self._followers.expect(sampled)
        return sampled

    def close(self) -> None:
        self._runner.close()
        self._followers.stop()
        self._ranks.close()  # as they do: it may wait for them
        self._followers.close()
