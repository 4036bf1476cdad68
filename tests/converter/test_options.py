"""What the options do: engine settings, sliding windows, templates, --dry-run, --check."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from limpet.backend.checkpoint import CheckpointDir
from limpet.backend.config import parse_parameters
from limpet.converter.cli import main
from limpet.converter.engine_settings import DESCRIPTIONS
from tests.aids.tiny import write_tiny
from tests.converter.checkpoints import edit_json, run_convert
from tests.converter.families import build, write_bin_folder, write_folder, write_meta_folder
from tests.converter.pbtxt import read_parameters
from tests.converter.vocabularies import write_sentencepiece_model

SETTINGS = {
    "session_len": "100",
    "max_batch_size": "8",
    "cache_max_entry_count": "0.5",
    "cache_bytes": "1000000",
    "host_cache_bytes": "2000000",
    "cache_block_seq_len": "32",
    "max_prefill_token_num": "64",
    "max_waiting": "9",
    "tp": "2",
    "all_reduce": "nccl",
    "enable_prefix_caching": "false",
    "dtype": "bfloat16",
    "deterministic": "true",
    "device": "cpu",
    "load_format": "dummy",
    "session_idle_timeout_s": "60.0",
    "session_store": "/var/lib/limpet/chat.db",
    "context_overflow": "drop_oldest_turns",
    "max_sessions": "7",
    "default_exclude_input": "false",
    "admin_key": 'a "quoted" key\\',
    "log_prompts": "true",
}


def read_settings(checkpoint: CheckpointDir) -> dict[str, str]:
    return read_parameters((checkpoint.root / "config.pbtxt").read_text("utf-8"))


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_every_engine_setting_is_an_option_and_arrives_in_the_configuration(tmp_path: Path, name: str) -> None:
    write_tiny(tmp_path / "source")
    flag = "--compute-dtype" if name == "dtype" else f"--{name.replace('_', '-')}"
    parameters = read_settings(run_convert(tmp_path / "source", tmp_path, flag, SETTINGS[name]))
    assert parameters[name] == SETTINGS[name]
    changed = parse_parameters(parameters)
    assert {field for field in DESCRIPTIONS if getattr(changed, field) != getattr(parse_parameters({}), field)} == {
        name
    }


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--tp", "0"], "Parameter tp is '0'"),
        (["--cache-block-seq-len", "48"], "cache_block_seq_len"),
        (["--cache-max-entry-count", "1"], "cache_max_entry_count"),
        (["--session-len", "long"], "session_len"),
        (["--unknown", "1"], "unrecognized arguments"),
        (["--check", "x"], "give either SOURCE or --check DIR"),
    ],
)
def test_wrong_option_is_wrong_usage(options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["source", *options])
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_neither_source_nor_check_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert "give either SOURCE or --check DIR" in capsys.readouterr().err


def test_context_longer_than_the_models_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(tmp_path / "source")
    assert main([str(tmp_path / "source"), "--dst", str(tmp_path), "--session-len", "513"]) == 1
    assert "--session-len 513 is more than 512, the model's context" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "limit"), [("rope-linear", 4 * 512), ("rope-yarn", 4 * 16), ("rope-dynamic", 512), ("llama-3.1", 512)]
)
def test_scaled_rope_extends_the_context_where_the_scaling_is_fixed(tmp_path: Path, family: str, limit: int) -> None:
    write_folder(tmp_path / "source", build(family))
    assert run_convert(tmp_path / "source", tmp_path).model_config().max_position_embeddings == limit


def test_sliding_window_caps_the_context_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "source", build("mistral"))
    edit_json(tmp_path / "source/config.json", sliding_window=128)
    checkpoint = run_convert(tmp_path / "source", tmp_path)
    assert read_settings(checkpoint)["session_len"] == "128"
    assert checkpoint.model_config().sliding_window == 128
    assert "session_len is set to 128" in capsys.readouterr().err


def test_sliding_window_of_a_folder_with_params_json_caps_the_context(tmp_path: Path) -> None:
    """As Mistral publishes its own folders."""
    tokenizer = write_sentencepiece_model(tmp_path / "tokenizer.model")
    write_meta_folder(tmp_path / "source", build("meta"), tokenizer, 1, sliding_window=128)
    assert read_settings(run_convert(tmp_path / "source", tmp_path))["session_len"] == "128"


def test_context_past_the_sliding_window_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "source", build("mistral"))
    edit_json(tmp_path / "source/config.json", sliding_window=128)
    assert main([str(tmp_path / "source"), "--dst", str(tmp_path), "--session-len", "129"]) == 1
    assert "sliding window" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"use_sliding_window": False, "sliding_window": 128}, None),
        ({"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1}, 128),
        ({"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2, "layer_types": None}, None),
        ({"use_sliding_window": True, "sliding_window": 128, "layer_types": ["full_attention"] * 2}, None),
        ({"use_sliding_window": True, "sliding_window": 128, "layer_types": ["sliding_attention"] * 2}, 128),
    ],
)
def test_qwen_has_a_window_only_where_it_uses_one(
    tmp_path: Path, changes: dict[str, object], window: int | None
) -> None:
    write_folder(tmp_path / "source", build("qwen2"))
    edit_json(tmp_path / "source/config.json", **{"layer_types": None} | changes)
    assert run_convert(tmp_path / "source", tmp_path).model_config().sliding_window == window


@pytest.mark.parametrize("name", ["llama2", "llama3", "chatml", "deepseek-v2"])
def test_built_in_template_replaces_the_checkpoints_own_and_only_appends(tmp_path: Path, name: str) -> None:
    write_tiny(tmp_path / "source")
    checkpoint = run_convert(tmp_path / "source", tmp_path, "--chat-template", name)
    template = checkpoint.chat_template()
    assert template is not None
    assert "<|assistant|>" not in template  # of the tiny models' own
    assert checkpoint.tokenizer_config().append_only_template


def test_template_from_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    write_tiny(tmp_path / "source")
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}", "utf-8")
    checkpoint = run_convert(tmp_path / "source", tmp_path, "--chat-template", str(tmp_path / "mine.jinja"))
    assert checkpoint.chat_template() == "{% for m in messages %}{{ m.content }}\n{% endfor %}"


def test_template_that_is_neither_name_nor_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(tmp_path / "source")
    assert main([str(tmp_path / "source"), "--dst", str(tmp_path), "--chat-template", "vicuna"]) == 1
    assert "names are llama2, llama3, chatml, deepseek-v2" in capsys.readouterr().err


def test_template_for_tokens_that_the_model_lacks_is_warned_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(tmp_path / "source")
    run_convert(tmp_path / "source", tmp_path, "--chat-template", "chatml")
    assert "no token <|im_start|>, <|im_end|>" in capsys.readouterr().err


def test_template_that_rewrites_earlier_turns_is_found_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(tmp_path / "source")
    rewriting = (
        "{% for m in messages %}{{ m.content.split('</think>')[-1] if not loop.last else m.content }}{% endfor %}!"
    )
    (tmp_path / "source/chat_template.jinja").write_text(rewriting, "utf-8")
    assert not run_convert(tmp_path / "source", tmp_path).tokenizer_config().append_only_template
    assert "rewrites earlier turns" in capsys.readouterr().err


def test_dry_run_prints_every_weight_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(tmp_path / "source")
    assert main([str(tmp_path / "source"), "--dst", str(tmp_path / "workspace"), "--dry-run"]) == 0
    output = capsys.readouterr().out
    layer = "model.layers.1.self_attn."
    fused = f"{layer}q_proj.weight + {layer}k_proj.weight + {layer}v_proj.weight"
    assert f"    layers.1.qkv_proj.weight [80, 48] = {fused}\n" in output
    assert not (tmp_path / "workspace").exists()


@pytest.mark.parametrize("place", [".", "model_repository", "model_repository/model"])
def test_check_finds_the_model_wherever_it_is_pointed(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(tmp_path / "source")
    run_convert(tmp_path / "source", tmp_path / "workspace")
    assert main(["--check", str(tmp_path / "workspace" / place)]) == 0
    assert "model is complete and unchanged" in capsys.readouterr().out


def _flip_a_byte(checkpoint: CheckpointDir) -> None:
    with checkpoint.weight_files()[0].open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def _drop_a_layer(checkpoint: CheckpointDir) -> None:
    """A configuration that does not fit the weights, its checksum put right."""
    edit_json(checkpoint.model_path, num_layers=1)
    data = checkpoint.model_path.read_bytes()
    manifest = json.loads(checkpoint.manifest_path.read_text())
    manifest["files"]["model.json"] = {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    checkpoint.manifest_path.write_text(json.dumps(manifest))


FAULTS = {
    "flipped bit": (_flip_a_byte, "was changed after the conversion"),
    "missing file": (lambda checkpoint: checkpoint.tokenizer_path.unlink(), "lacks tokenizer.json"),
    "cut file": (lambda checkpoint: os.truncate(checkpoint.weight_files()[0], 1000), "has 1000 bytes"),
    "other file": (lambda checkpoint: (checkpoint.folder / "more.bin").touch(), "more.bin is not in the manifest"),
    "no manifest": (lambda checkpoint: checkpoint.manifest_path.unlink(), "holds no converted model"),
    "broken manifest": (lambda checkpoint: checkpoint.manifest_path.write_text("{"), "manifest.json is damaged"),
    "other configuration": (_drop_a_layer, "does not fit the configuration"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_names_what_is_wrong(tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(tmp_path / "source")
    checkpoint = run_convert(tmp_path / "source", tmp_path / "workspace")
    damage, sentence = FAULTS[fault]
    damage(checkpoint)
    capsys.readouterr()
    assert main(["--check", str(tmp_path / "workspace")]) == 1
    assert sentence in capsys.readouterr().err


def test_check_notices_that_a_linked_source_was_edited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(tmp_path / "source")
    run_convert(tmp_path / "source", tmp_path / "workspace", "--link")
    assert main(["--check", str(tmp_path / "workspace")]) == 0
    with (tmp_path / "source/model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"abcd")
    assert main(["--check", str(tmp_path / "workspace")]) == 1
    assert "linked-model.safetensors was changed" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--dtype", "bfloat16"], []])
def test_link_that_would_link_nothing_is_refused(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if options:
        write_tiny(tmp_path / "source")
    else:
        write_bin_folder(tmp_path / "source", build("llama-2"))
    assert main([str(tmp_path / "source"), "--dst", str(tmp_path), "--link", *options]) == 1
    assert "Nothing can be linked" in capsys.readouterr().err
