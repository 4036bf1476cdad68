"""A converted model whose weights do not fit its configuration is not served: the refusal names the tensor."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from limpet.backend.checkpoint import CheckpointDir, CheckpointError
from limpet.backend.config import EngineConfig
from limpet.backend.offline import LocalEngine
from tests.aids.tiny_models import convert_tiny

Tensors = dict[str, torch.Tensor]
NORM = "layers.1.input_norm.weight"
FAULTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop(NORM), f"lacks .*{NORM}"),
    "left over": (lambda t: t.update({"layers.2.input_norm.weight": t[NORM].clone()}), r"layers\.2\..* belongs to no"),
    "other shape": (lambda t: t.update({NORM: torch.ones(47)}), rf"{NORM} has shape \[47\], the model needs \[48\]"),
    "too large": (lambda t: t.update({NORM: torch.full((48,), 1e6)}), f"{NORM} does not fit into float16"),
}


def edit_weights(path: Path, edit: Callable[[Tensors], object]) -> None:
    """Change a file of weights and the size that the manifest states."""
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
    manifest = json.loads((path.parent / "manifest.json").read_text())
    manifest["files"].setdefault(path.name, {"sha256": ""})["num_bytes"] = path.stat().st_size
    (path.parent / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, fault: str) -> None:
    model_dir = convert_tiny(tmp_path, "grouped-query").model_dir
    edit, complaint = FAULTS[fault]
    edit_weights(CheckpointDir(model_dir).weight_files()[0], edit)
    with pytest.raises(CheckpointError, match=complaint):
        LocalEngine(model_dir, EngineConfig(device="cpu", dtype="float16"))


def test_weight_that_is_there_twice_is_named(tmp_path: Path) -> None:
    model_dir = convert_tiny(tmp_path, "grouped-query").model_dir
    second = model_dir / "1/checkpoint/weights-00002-of-00002.safetensors"
    save_file({NORM: torch.ones(48)}, second)
    edit_weights(second, lambda tensors: None)
    with pytest.raises(CheckpointError, match=f"{NORM} of weights-00002-of-00002.safetensors is there twice"):
        LocalEngine(model_dir, EngineConfig(device="cpu"))
