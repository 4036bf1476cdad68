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


def write_sparse_deepseek(folder: Path, **numbers: Any) -> int:
    """A bfloat16 DeepSeek-V2-Lite of zeros that takes no room on disk; returns the bytes of its weights."""
    write_tiny(folder)
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        **numbers,
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    hidden, size, vocabulary = (config[key] for key in ("hidden_size", "moe_intermediate_size", "vocab_size"))
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, v_dim = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    shapes["model.norm.weight"] = (hidden,)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (heads * (nope + rope), hidden),
            f"{prefix}self_attn.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
            f"{prefix}self_attn.kv_a_layernorm.weight": (rank,),
            f"{prefix}self_attn.kv_b_proj.weight": (heads * (nope + v_dim), rank),
            f"{prefix}self_attn.o_proj.weight": (hidden, heads * v_dim),
        }
        mlps = {f"{prefix}mlp.": config["intermediate_size"]}
        if layer >= config["first_k_dense_replace"]:
            shapes[f"{prefix}mlp.gate.weight"] = (config["n_routed_experts"], hidden)
            mlps = {f"{prefix}mlp.shared_experts.": config["n_shared_experts"] * size}
            mlps |= {f"{prefix}mlp.experts.{expert}.": size for expert in range(config["n_routed_experts"])}
        for name, rows in mlps.items():
            shapes |= {f"{name}{part}_proj.weight": (rows, hidden) for part in ("gate", "up")}
            shapes[f"{name}down_proj.weight"] = (hidden, rows)
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


def assert_converts_within_twice(largest: int, folder: Path, weight_bytes: int) -> None:
    """`largest` are the bytes of what has to be in memory at once; skips where the disk is too small."""
    if shutil.disk_usage(folder).free < 1.1 * weight_bytes:
        pytest.skip(f"the converted model takes {weight_bytes / 1e9:.1f} GB of disk")
    grown = convert_and_measure(folder / "source", folder / "workspace", 3500)
    print(f"peak {grown / 1e6:.0f} MB over the start, largest part {largest / 1e6:.0f} MB")
    files = CheckpointDir(folder / "workspace/model_repository/model").weight_files()
    assert sum(path.stat().st_size for path in files) > weight_bytes
    shutil.rmtree(folder / "workspace")
    assert grown < 2 * largest


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


def test_memory_holds_one_expert_of_a_stack(tmp_path: Path) -> None:
    write_sparse_deepseek(
        tmp_path / "source",
        hidden_size=1024,
        intermediate_size=1024,
        moe_intermediate_size=1024,
        n_routed_experts=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        vocab_size=2000,
    )
    stack_bytes = 66 * 2 * 2 * 1024 * 1024
    assert convert_and_measure(tmp_path / "source", tmp_path / "workspace", 200) < stack_bytes // 3


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_deepseek_v2_lite_converts_within_twice_its_largest_tensor(tmp_path: Path) -> None:
    weight_bytes = write_sparse_deepseek(
        tmp_path / "source",
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        num_hidden_layers=27,
        num_attention_heads=16,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        vocab_size=102400,
    )
    assert_converts_within_twice(2 * 102400 * 2048, tmp_path, weight_bytes)  # the embedding


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
    assert_converts_within_twice(2 * 32000 * 4096, tmp_path, weight_bytes)  # the embedding
