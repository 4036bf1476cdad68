"""Conversion needs the memory of one tensor group, not of the model."""

import json
import shutil
import struct
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest

from limpet.backend.checkpoint import CheckpointDir
from tests.aids.tiny import write_tiny

_MIB = 1 << 20
_MEASURE = """
import re, sys
from limpet.converter.cli import main

def peak_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

before = peak_kib()
code = main(sys.argv[1:])
print("grown", peak_kib() - before)
sys.exit(code)
"""


def write_sparse_llama(folder: Path, **numbers: Any) -> int:
    """A bfloat16 Llama of zeros that takes no room on disk; returns the bytes of its weights."""
    write_tiny(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": numbers["num_attention_heads"],
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        **numbers,
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    hidden, intermediate, vocabulary = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    shapes["model.norm.weight"] = (hidden,)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
        shapes |= {f"{prefix}mlp.{part}_proj.weight": (intermediate, hidden) for part in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, intermediate)
        shapes |= {f"{prefix}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
    _write_sparse(folder / "model.safetensors", shapes)
    return 2 * sum(prod(shape) for shape in shapes.values())


def _write_sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


def convert_and_measure(source: Path, workspace: Path, timeout_s: float) -> int:
    """Bytes by which the converting process grew over its size before."""
    arguments = [str(source), "--dst", str(workspace), "--name", "model"]
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE, *arguments], capture_output=True, text=True, timeout=timeout_s, check=True
    )
    return int(result.stdout.split("grown")[1]) * 1024


def test_memory_follows_the_largest_tensor_group(tmp_path: Path) -> None:
    weight_bytes = write_sparse_llama(
        tmp_path / "source",
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=16,
        vocab_size=2000,
    )
    assert weight_bytes > 250 * _MIB
    largest_group = 2 * 2 * 4096 * 1024
    assert convert_and_measure(tmp_path / "source", tmp_path / "workspace", 200) < 3 * largest_group + 64 * _MIB


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_llama_2_7b_converts_within_twice_its_largest_group(tmp_path: Path) -> None:
    weight_bytes = write_sparse_llama(
        tmp_path / "source",
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        vocab_size=32000,
    )
    if shutil.disk_usage(tmp_path).free < 1.1 * weight_bytes:
        pytest.skip(f"the converted model takes {weight_bytes / 1e9:.1f} GB of disk")
    largest_group = 2 * 32000 * 4096  # the embedding
    grown = convert_and_measure(tmp_path / "source", tmp_path / "workspace", 3500)
    print(f"peak {grown / 1e6:.0f} MB over the start, largest group {largest_group / 1e6:.0f} MB")
    files = CheckpointDir(tmp_path / "workspace/model_repository/model").weight_files()
    assert sum(path.stat().st_size for path in files) > weight_bytes
    shutil.rmtree(tmp_path / "workspace")
    assert grown < 2 * largest_group
