"""Aliases: more Triton models in front of one engine, written beside the converted one."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from limpet.converter.cli import main
from tests.aids.tiny import write_tiny

ALL = ("--alias", "trtllm", "--alias", "trtllm-u32", "--alias", "infer")
COUNTS = ("max_tokens", "top_k", "beam_width")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "tiny"
    write_tiny(folder)
    return folder


def convert(source: Path, workspace: Path, *flags: str) -> int:
    return main([str(source), "--dst", str(workspace), *flags])


def config(workspace: Path, name: str) -> Any:
    text = (workspace / "model_repository" / name / "config.pbtxt").read_text("utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_aliases_have_their_models_tensors_in_the_shapes_and_types_of_their_clients(
    source: Path, tmp_path: Path
) -> None:
    assert convert(source, tmp_path, *ALL) == 0
    names = ("tiny", "ensemble", "ensemble_u32", "tiny_infer")
    found = {folder.name for folder in (tmp_path / "model_repository").iterdir()}
    assert found == {*names, "limpet_admin"}
    plain, ensemble, unsigned, infer = (config(tmp_path, name) for name in names)
    assert [each.name for each in (plain, ensemble, unsigned, infer)] == list(names)
    assert [each.max_batch_size for each in (plain, ensemble, unsigned, infer)] == [0, 1, 1, 0]
    assert [each.model_transaction_policy.decoupled for each in (plain, ensemble, unsigned, infer)] == [
        True,
        True,
        True,
        False,
    ]
    for alias in (ensemble, unsigned, infer):
        assert {name: value.string_value for name, value in alias.parameters.items()} == {"alias_of": "tiny"}
        assert list(alias.output) == list(plain.output)
    assert list(ensemble.input) == list(infer.input) == list(plain.input)
    types = {tensor.name: tensor.data_type for tensor in plain.input}
    changed = {tensor.name for tensor in unsigned.input if tensor.data_type != types[tensor.name]}
    assert changed == set(COUNTS)
    assert all(tensor.data_type == model_config_pb2.TYPE_UINT32 for tensor in unsigned.input if tensor.name in COUNTS)


def test_another_name_makes_room_for_a_second_models_alias(source: Path, tmp_path: Path) -> None:
    assert convert(source, tmp_path, "--alias", "trtllm") == 0
    assert convert(source, tmp_path, "--name", "other", "--alias", "trtllm=tensorrt_llm_bls") == 0
    targets = [config(tmp_path, name).parameters["alias_of"].string_value for name in ("ensemble", "tensorrt_llm_bls")]
    assert targets == ["tiny", "other"]


def test_a_new_conversion_may_write_its_own_aliases_again(source: Path, tmp_path: Path) -> None:
    assert convert(source, tmp_path, "--alias", "infer") == 0
    assert convert(source, tmp_path, "--alias", "infer", "--force") == 0


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--alias", "vllm"), "allowed are trtllm, trtllm-u32, infer"),
        (("--alias", "infer=tiny"), "Two models would be called tiny"),
        (("--alias", "trtllm=x", "--alias", "infer=x"), "Two models would be called x"),
        (("--alias", "infer=limpet_admin"), "cannot name a model"),
        (("--alias", "infer=first"), "is no alias of tiny"),
        (("--alias", "trtllm", "--force"), "is no alias of tiny"),
    ],
)
def test_names_that_collide_are_refused_before_anything_is_written(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], reason: str
) -> None:
    assert convert(source, tmp_path, "--name", "first", "--alias", "trtllm") == 0
    before = sorted((tmp_path / "model_repository").rglob("*"))
    assert convert(source, tmp_path, *flags) == 1
    assert reason in capsys.readouterr().err
    assert sorted((tmp_path / "model_repository").rglob("*")) == before
