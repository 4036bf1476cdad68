"""Meta-parameters that were measured on a device: `make tune` writes kernels/tuned/<device>.json, nothing else does."""

import json
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch

Table: TypeAlias = dict[str, dict[str, list[int]]]  # kernel -> key -> meta-parameters

FOLDER = Path(__file__).parent / "tuned"


def table_path(device_name: str) -> Path:
    return FOLDER / f"{device_name.lower().replace(' ', '-')}.json"


@cache
def tuned(kernel: str, key: str, device: torch.device) -> tuple[int, ...] | None:
    """What was measured to be best for `kernel` in the case `key`; None where nobody measured."""
    if device.type != "cuda":
        return None
    found = _table(torch.cuda.get_device_name(device)).get(kernel, {}).get(key)
    return None if found is None else tuple(found)


@cache
def _table(device_name: str) -> Table:
    path = table_path(device_name)
    table: Table = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return table
