"""Which class computes which architecture."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from limpet.backend.checkpoint import ModelConfig
from limpet.backend.models.causal_lm import CausalLM
from limpet.backend.models.deepseek_v2 import DeepseekV2ForCausalLM
from limpet.backend.models.llama import LlamaForCausalLM
from limpet.backend.ranks.group import ALONE, RankGroup

MODELS: dict[str, Callable[[ModelConfig, int, torch.device, RankGroup], CausalLM]] = {
    "llama": LlamaForCausalLM,
    "deepseek_v2": DeepseekV2ForCausalLM,
}


def build_model(
    config: ModelConfig, session_len: int, device: torch.device, dtype: torch.dtype, ranks: RankGroup = ALONE
) -> CausalLM:
    """The model, or this rank's part of it, with uninitialised weights of `dtype` on `device`."""
    with device, _default_dtype(dtype):
        return MODELS[config.architecture](config, session_len, device, ranks)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
