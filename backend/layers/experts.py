"""A mixture of experts in the place of an MLP."""

from typing import NamedTuple

from torch import Tensor, nn

from limpet.backend.checkpoint import ExpertsConfig
from limpet.backend.layers.device_kernels import kernels_for
from limpet.backend.ranks.group import RankGroup


class SplitExpert(NamedTuple):
    """A shared expert of which several ranks have some columns each."""

    expert: range  # of one
    columns: range  # of its intermediate results


class ExpertParts(NamedTuple):
    """What a rank has of a layer's experts, numbered as they are stacked: the routed ones, then the shared ones.

    Routed experts are whole. So are shared ones that divide by the ranks, which are then computed like routed ones.
    """

    routed: range
    shared: range
    split: SplitExpert | None

    @classmethod
    def of(cls, config: ExpertsConfig, ranks: RankGroup) -> "ExpertParts":
        routed, num_routed, num_shared = ranks.part(config.num_experts), config.num_experts, config.num_shared_experts
        if num_shared % ranks.size == 0:
            shared = ranks.part(num_shared)
            return cls(routed, range(num_routed + shared.start, num_routed + shared.stop), None)
        [expert] = ranks.part_or_shared(num_shared)
        sharers = ranks.size // num_shared
        width = config.intermediate_size // sharers
        first = ranks.rank % sharers * width
        split = SplitExpert(range(num_routed + expert, num_routed + expert + 1), range(first, first + width))
        return cls(routed, range(0), split)


class MixtureOfExperts(nn.Module):
    """Each token's weighted sum of those `routed` experts that it is routed to, and of shared ones. Holds no weights.

    With `fixed_order` a token's bits do not depend on the other tokens, nor on how many there are (CUDA).
    """

    def __init__(self, config: ExpertsConfig, routed: range) -> None:
        super().__init__()
        self._config = config
        self._routed = routed
        self.fixed_order = False

    def forward(self, x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """x [num_tokens, hidden] -> like x.

        router [num_experts, hidden]; gate_up [num_routed + num_shared, 2 * intermediate, hidden] = gate rows, then up
        rows; down [num_routed + num_shared, hidden, intermediate].
        """
        config = self._config
        return kernels_for(x.device).mix_experts(
            x,
            router,
            gate_up,
            down,
            config.num_experts_per_token,
            config.num_groups,
            config.num_groups_per_token,
            config.scaling_factor,
            config.normalizes_weights,
            routed=self._routed,
            fixed_order=self.fixed_order,
        )
