"""Tiny random models, converted: a folder for LocalEngine beside the transformers model of the same weights."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from limpet.converter.convert import convert
from limpet.converter.plan import Options, make_plan
from tests.aids.deepseek import DEEPSEEK_SHAPES, LARGE_SHAPES, write_deepseek
from tests.aids.tiny import write_tiny


@dataclass(frozen=True)
class ConvertedTiny:
    """`model_dir` is what the engine reads; `reference` computes with the same weights in float32."""

    model_dir: Path
    reference: PreTrainedModel


def convert_tiny(folder: Path, shape: str, *, max_shard_size: str = "1GB") -> ConvertedTiny:
    """Write the model of that shape (TINY_SHAPES, DEEPSEEK_SHAPES, LARGE_SHAPES) into `folder` and convert it there."""
    if shape in DEEPSEEK_SHAPES | LARGE_SHAPES:
        reference = write_deepseek(folder / "source", shape)
    else:
        reference = write_tiny(folder / "source", shape, max_shard_size=max_shard_size)
    plan = make_plan(Options(source=folder / "source", workspace=folder, name="tiny"))
    convert(plan, lambda num_bytes: None)
    return ConvertedTiny(plan.target, reference)
