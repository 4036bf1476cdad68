"""Over how many ranks a model can be split. No torch."""

from limpet.backend.checkpoint import ExpertsConfig, ModelConfig
from limpet.backend.config import ConfigError


def check_degree(config: ModelConfig, size: int) -> None:
    """Raises ConfigError naming the degrees that work."""
    if not is_possible(config, size):
        works = ", ".join(str(each) for each in range(1, config.num_heads + 1) if is_possible(config, each))
        raise ConfigError(f"tp is {size}, by which this model's heads or experts do not divide: {works} work.")


def is_possible(config: ModelConfig, size: int) -> bool:
    """Whether heads, experts and columns of MLPs divide; K/V heads may be shared by ranks instead."""
    num_dense = config.num_layers if config.experts is None else config.experts.num_dense_layers
    return (
        config.num_heads % size == 0
        and (config.latent_attention is not None or _divides_either_way(config.num_kv_heads, size))
        and (num_dense == 0 or config.intermediate_size % size == 0)
        and (config.experts is None or _experts_divide(config.experts, size))
    )


def _experts_divide(experts: ExpertsConfig, size: int) -> bool:
    num_shared = experts.num_shared_experts
    if num_shared % size == 0:
        return experts.num_experts % size == 0
    sharers, rest = divmod(size, num_shared)
    return experts.num_experts % size == 0 and rest == 0 and experts.intermediate_size % sharers == 0


def _divides_either_way(count: int, size: int) -> bool:
    return count % size == 0 or size % count == 0
