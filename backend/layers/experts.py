"""A mixture of experts in the place of an MLP."""

from torch import Tensor, nn

from limpet.backend.checkpoint import ExpertsConfig
from limpet.backend.layers.device_kernels import kernels_for


class MixtureOfExperts(nn.Module):
    """Each token's weighted sum of the experts it is routed to and of the shared ones. Holds no weights.

    With `fixed_order` a token's bits do not depend on the other tokens, nor on how many there are (CUDA).
    """

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__()
        self._config = config
        self.fixed_order = False

    def forward(self, x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """x [num_tokens, hidden] -> like x.

        router [num_experts, hidden]; gate_up [num_experts + num_shared, 2 * intermediate, hidden] = gate rows, then up
        rows; down [num_experts + num_shared, hidden, intermediate].
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
            fixed_order=self.fixed_order,
        )
