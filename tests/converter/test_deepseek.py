"""DeepSeek-V2 from Hugging Face folders and GGUF files: transformers' ids through the engine, or a refusal by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, PreTrainedModel

from limpet.converter.cli import main
from tests.aids.deepseek import DEEPSEEK_SHAPES, build_deepseek, write_deepseek
from tests.converter.checkpoints import add_tiny_tokenizer, converted_weights, edit_json, edit_weights, run_convert
from tests.converter.families import assert_engine_gives_transformers_ids


@pytest.mark.parametrize("shape", DEEPSEEK_SHAPES)
def test_folder(tmp_path: Path, shape: str) -> None:
    model = write_deepseek(tmp_path / "source", shape)
    assert_engine_gives_transformers_ids(run_convert(tmp_path / "source", tmp_path).root, model)


def test_linked_folder(tmp_path: Path) -> None:
    model = write_deepseek(tmp_path / "source", "v2")
    assert_engine_gives_transformers_ids(run_convert(tmp_path / "source", tmp_path, "--link").root, model)


def test_folder_without_shared_experts(tmp_path: Path) -> None:
    """transformers needs some: they give nothing in its model, and the folder lacks them."""
    model = write_deepseek(tmp_path / "source", "lite")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "shared_experts.down_proj" in name:
                parameter.zero_()

    def remove_shared(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "shared_experts" in name]:
            del tensors[name]

    edit_weights(tmp_path / "source", remove_shared)
    edit_json(tmp_path / "source/config.json", n_shared_experts=None)
    checkpoint = run_convert(tmp_path / "source", tmp_path)
    assert converted_weights(checkpoint)["layers.1.experts_down"].shape[0] == 16
    assert_engine_gives_transformers_ids(checkpoint.root, model)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'; only softmax"),
        ({"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'; supported are greedy and group_limited_greedy"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2; only 1"),
        ({"attention_bias": True}, "biases"),
        ({"n_group": 3}, "20 experts cannot be put into 3 equal groups"),
        ({"topk_group": 1}, "cannot go to 6 of 5 experts"),
        ({"num_experts_per_tok": None}, "lacks the number num_experts_per_tok"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"first_k_dense_replace": 2}, "model.layers.1.mlp.gate_proj.weight"),
        ({"n_routed_experts": 10**9}, "4 layers with 1000000000 experts and 2 shared ones, the checkpoint"),
        ({"n_shared_experts": 10**15}, "1000000000000000 shared ones, the checkpoint"),
        ({"n_routed_experts": 24}, "model.layers.1.mlp.experts.20.gate_proj.weight"),
        (
            {"rope_parameters": {"type": "yarn", "factor": 8.0, "mscale": 1.0, "original_max_position_embeddings": 64}},
            "one of mscale and mscale_all_dim",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_deepseek(tmp_path / "source", "v2")
    edit_json(tmp_path / "source/config.json", **changes)
    assert main([str(tmp_path / "source"), "--dst", str(tmp_path / "workspace")]) == 1
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("is_new", [False, True], ids=["old", "new"])
@pytest.mark.parametrize("shape", ["lite", "v2"])
def test_gguf_file(tmp_path: Path, shape: str, is_new: bool) -> None:
    """Old files keep kv_b whole and the expanded heads' sizes, new ones split it and give those of one latent head."""
    model = build_deepseek(shape)
    if shape == "v2":  # llama.cpp has one factor for both corrections
        model = _with_equal_mscales(model)
    write_deepseek_gguf(tmp_path / "source.gguf", model, is_new=is_new)
    assert_engine_gives_transformers_ids(run_convert(tmp_path / "source.gguf", tmp_path).root, model)


def test_gguf_file_that_does_not_state_the_groups_of_160_experts(tmp_path: Path) -> None:
    changes = {"n_routed_experts": 160, "n_group": 8, "topk_group": 3, "num_hidden_layers": 2, "topk_method": "greedy"}
    config = DeepseekV2Config(**DEEPSEEK_SHAPES["lite"] | changes)
    write_deepseek_gguf(tmp_path / "source.gguf", DeepseekV2ForCausalLM(config).eval(), is_new=False)
    experts = run_convert(tmp_path / "source.gguf", tmp_path).model_config().experts
    assert experts is not None
    assert (experts.num_groups, experts.num_groups_per_token) == (8, 3)


def test_gguf_file_of_absurdly_many_heads_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_deepseek("lite")
    model.config.num_attention_heads = 10**9
    write_deepseek_gguf(tmp_path / "source.gguf", model, is_new=True, tensors_of=build_deepseek("lite"))
    assert main([str(tmp_path / "source.gguf"), "--dst", str(tmp_path)]) == 1
    assert "states 1000000000 heads" in capsys.readouterr().err


def test_gguf_file_of_another_gate_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_deepseek_gguf(tmp_path / "source.gguf", build_deepseek("lite"), is_new=True, gating=2)
    assert main([str(tmp_path / "source.gguf"), "--dst", str(tmp_path)]) == 1
    assert "expert_gating_func is 2" in capsys.readouterr().err


def _with_equal_mscales(model: PreTrainedModel) -> PreTrainedModel:
    rope = model.config.rope_parameters | {"mscale": 1.0, "mscale_all_dim": 1.0}
    model.config.rope_parameters = rope
    equal = type(model)(model.config).eval()
    equal.load_state_dict(model.state_dict())
    return equal


def write_deepseek_gguf(
    path: Path, model: PreTrainedModel, *, is_new: bool, gating: int = 1, tensors_of: PreTrainedModel | None = None
) -> None:
    """As llama.cpp's converter writes the architecture deepseek2; `tensors_of` another model than the numbers."""
    config = model.config
    writer = gguf.GGUFWriter(path, "deepseek2")
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if is_new:
        writer.add_head_count_kv(1)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(head_dim)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType(gating))
    else:
        writer.add_head_count_kv(config.num_attention_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(config.v_head_dim)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.topk_method == "group_limited_greedy":
        writer.add_uint32("deepseek2.expert_group_count", config.n_group)
        writer.add_uint32("deepseek2.expert_group_used_count", config.topk_group)
    rope = config.rope_parameters
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    add_tiny_tokenizer(writer, ())
    for name, values in _gguf_tensors(tensors_of or model, is_new):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}


def _gguf_tensors(model: PreTrainedModel, is_new: bool) -> Iterator[tuple[str, np.ndarray]]:
    config = model.config
    for name, tensor in model.state_dict().items():
        stem = name.removesuffix(".weight")
        prefix = ""
        if stem.startswith("model.layers."):
            layer, stem = stem.removeprefix("model.layers.").split(".", 1)
            prefix = f"blk.{layer}."
        if stem == "mlp.experts.gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            yield f"{prefix}ffn_gate_exps.weight", gate.contiguous().numpy()
            yield f"{prefix}ffn_up_exps.weight", up.contiguous().numpy()
        elif stem == "mlp.experts.down_proj":
            yield f"{prefix}ffn_down_exps.weight", tensor.numpy()
        elif stem == "self_attn.kv_b_proj" and is_new:
            by_head = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = by_head.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            yield f"{prefix}attn_k_b.weight", keys.transpose(1, 2).contiguous().numpy()
            yield f"{prefix}attn_v_b.weight", values.contiguous().numpy()
        else:
            yield f"{prefix}{_NAMES[stem]}.weight", tensor.numpy()
