"""Hugging Face folders: every weight arrives where the format says, whatever the folder's files look like."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from limpet.backend.checkpoint import CheckpointDir
from limpet.converter.cli import main
from tests.aids.tiny import TINY_SHAPES, write_tiny
from tests.converter.checkpoints import converted_weights, edit_json, edit_weights, run_convert


@pytest.mark.parametrize("shape", TINY_SHAPES)
def test_weights_are_the_checkpoints_under_their_new_names(tmp_path: Path, shape: str) -> None:
    source = tmp_path / "source"
    model = write_tiny(source, shape)
    state = model.state_dict()
    weights = converted_weights(run_convert(source, tmp_path))
    layer = "model.layers.0."
    qkv = torch.cat([state[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"])
    gate_up = torch.cat([state[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(weights["layers.0.qkv_proj.weight"], qkv)
    assert torch.equal(weights["layers.0.gate_up_proj.weight"], gate_up)
    assert torch.equal(weights["layers.0.o_proj.weight"], state[f"{layer}self_attn.o_proj.weight"])
    assert torch.equal(weights["layers.0.down_proj.weight"], state[f"{layer}mlp.down_proj.weight"])
    assert torch.equal(weights["layers.0.post_attention_norm.weight"], state[f"{layer}post_attention_layernorm.weight"])
    assert torch.equal(weights["embed_tokens.weight"], state["model.embed_tokens.weight"])
    assert ("lm_head.weight" in weights) == (not model.config.tie_word_embeddings)
    assert ("layers.0.qkv_proj.bias" in weights) == model.config.attention_bias


def test_no_weight_is_lost_or_added(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "source", "biases")
    checkpoint = run_convert(tmp_path / "source", tmp_path)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert checkpoint.manifest().num_parameters == num_parameters
    assert sum(tensor.numel() for tensor in converted_weights(checkpoint).values()) == num_parameters


def test_sharded_folder_gives_the_same_weights_as_a_single_file(tmp_path: Path) -> None:
    write_tiny(tmp_path / "single")
    write_tiny(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    single = converted_weights(run_convert(tmp_path / "single", tmp_path / "a"))
    sharded = converted_weights(run_convert(tmp_path / "sharded", tmp_path / "b"))
    assert single.keys() == sharded.keys()
    assert all(torch.equal(single[name], sharded[name]) for name in single)


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_tiny(source, max_shard_size="20KB")
    before = converted_weights(run_convert(source, tmp_path / "a"))
    stray = {name: torch.randn(2, 3) for name in ("model.norm.weight", "lm_head.weight", "unknown.weight")}
    save_file(stray, source / "model.safetensors")
    save_file(stray, source / "model-00099-of-00099.safetensors")
    after = converted_weights(run_convert(source, tmp_path / "b"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_tensor_that_lies_in_a_second_shard_too_is_read_where_the_index_says(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_tiny(source, max_shard_size="20KB")
    before = converted_weights(run_convert(source, tmp_path / "a"))
    weight_map = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    name, other = "model.norm.weight", weight_map["model.embed_tokens.weight"]
    assert weight_map[name] != other
    save_file(load_file(source / other) | {name: torch.randn(48)}, source / other)
    after = converted_weights(run_convert(source, tmp_path / "b"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_tied_checkpoint_that_ships_the_same_head_stays_tied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_tiny(source, "tied")
    edit_weights(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    checkpoint = run_convert(source, tmp_path)
    assert checkpoint.model_config().tie_word_embeddings
    assert "lm_head.weight" not in converted_weights(checkpoint)


def test_head_that_differs_from_the_embedding_is_kept_though_the_configuration_ties(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    write_tiny(source, "grouped-query")
    edit_json(source / "config.json", tie_word_embeddings=True)
    checkpoint = run_convert(source, tmp_path)
    head = load_file(source / "model.safetensors")["lm_head.weight"]
    assert not checkpoint.model_config().tie_word_embeddings
    assert torch.equal(converted_weights(checkpoint)["lm_head.weight"], head)
    assert "ties the output head" in capsys.readouterr().err


def test_rotary_frequencies_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_tiny(source)
    edit_weights(source, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert "layers.0.qkv_proj.weight" in converted_weights(run_convert(source, tmp_path))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_casts_the_weights_and_is_recorded(tmp_path: Path, dtype: str) -> None:
    source = tmp_path / "source"
    state = write_tiny(source).state_dict()
    checkpoint = run_convert(source, tmp_path, "--dtype", dtype)
    embedding = converted_weights(checkpoint)["embed_tokens.weight"]
    assert checkpoint.model_config().dtype == dtype
    assert torch.equal(embedding, state["model.embed_tokens.weight"].to(getattr(torch, dtype)))


def test_auto_dtype_keeps_the_type_of_most_weights(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_tiny(source)

    def halve_all_but_norms(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: t.bfloat16() for name, t in tensors.items() if "norm" not in name})

    edit_weights(source, halve_all_but_norms)
    checkpoint = run_convert(source, tmp_path)
    assert checkpoint.model_config().dtype == "bfloat16"
    assert {t.dtype for t in converted_weights(checkpoint).values()} == {torch.bfloat16}


def test_end_ids_are_the_union_of_configuration_generation_settings_and_tokenizer(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_tiny(source)
    edit_json(source / "config.json", eos_token_id=7)
    edit_json(source / "generation_config.json", eos_token_id=[8, 7], temperature=0.6, top_p=0.9, top_k=None)
    checkpoint = run_convert(source, tmp_path)
    tokenizer_end = json.loads((source / "tokenizer_config.json").read_text())["eos_token"]
    vocabulary = {t["content"]: t["id"] for t in json.loads(checkpoint.tokenizer_path.read_text())["added_tokens"]}
    assert set(checkpoint.model_config().eos_token_ids) == {7, 8, vocabulary[tokenizer_end]}
    generation = checkpoint.tokenizer_config().generation
    assert (generation.temperature, generation.top_p, generation.top_k) == (0.6, 0.9, 0)


def test_end_ids_past_the_vocabulary_are_left_out_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    write_tiny(source)
    edit_json(source / "config.json", eos_token_id=[7, 99999])
    ends = run_convert(source, tmp_path).model_config().eos_token_ids
    assert 7 in ends
    assert 99999 not in ends
    assert "99999" in capsys.readouterr().err


def test_template_in_tokenizer_config_is_found(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_tiny(source)
    (source / "chat_template.jinja").unlink()
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}"}]
    edit_json(source / "tokenizer_config.json", chat_template=templates)
    assert run_convert(source, tmp_path).chat_template() == "{{ messages[0].content }}"


def test_checkpoint_without_template_is_raw_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    write_tiny(source)
    (source / "chat_template.jinja").unlink()
    assert run_convert(source, tmp_path).chat_template() is None
    assert "is no chat template" in capsys.readouterr().err


def test_folder_named_by_a_number_becomes_the_same_model_under_that_name(tmp_path: Path) -> None:
    write_tiny(tmp_path / "12000")
    assert main([str(tmp_path / "12000"), "--dst", str(tmp_path / "workspace")]) == 0
    numbered = CheckpointDir(tmp_path / "workspace/model_repository/12000")
    named = run_convert(tmp_path / "12000", tmp_path / "workspace")
    assert numbered.manifest().files == named.manifest().files
    assert 'name: "12000"' in (numbered.root / "config.pbtxt").read_text()


def test_snapshot_in_hugging_faces_cache_is_read_through_its_links_and_named_by_its_repository(tmp_path: Path) -> None:
    repository = tmp_path / "models--ada--tiny-chat"
    write_tiny(repository / "snapshots/0123abcd", max_shard_size="20KB")
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted((repository / "snapshots/0123abcd").iterdir())):
        path.rename(repository / f"blobs/{number}")
        path.symlink_to(f"../../blobs/{number}")
    assert main([str(repository / "snapshots/0123abcd"), "--dst", str(tmp_path), "--link"]) == 0
    checkpoint = CheckpointDir(tmp_path / "model_repository/tiny-chat")
    assert not any(path.is_symlink() for path in checkpoint.weight_files())
    assert main(["--check", str(checkpoint.root)]) == 0
