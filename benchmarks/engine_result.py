"""What every figure of an engine in this process says of machine, model and settings."""

from pathlib import Path
from typing import Any

import torch

from limpet.backend.offline import LocalEngine
from limpet.benchmarks import result
from limpet.benchmarks.result import Result


def engine_result(local: LocalEngine, model: Path, **figures: Any) -> Result:
    """A result of the model's engine; `figures` are the fields that differ from one benchmark to the next."""
    summary = local.summary
    on_gpu = summary.device.startswith("cuda")
    return Result(
        date=result.today(),
        commit=result.commit(),
        machine=torch.cuda.get_device_name() if on_gpu else result.cpu_machine(),
        gpu=torch.cuda.get_device_name() if on_gpu else "",
        torch=str(torch.__version__),
        model=model.name,
        dtype=summary.dtype,
        block_size=summary.block_size,
        threads=None if on_gpu else torch.get_num_threads(),
        **figures,
    )
