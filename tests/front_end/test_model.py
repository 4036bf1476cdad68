"""Triton's callbacks: what stops a load, and the tensors that the configuration declares."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

import limpet.model_repository
from limpet.backend.front_end.options import OPTION_NAMES
from limpet.backend.link.ownership import runtime_root
from limpet.converter.workspace import Face, render_config
from tests.front_end.fake_triton import TritonModelException

FOLDER = next(path for path in map(Path, limpet.model_repository.__path__) if path.is_dir())
TENSORS_OF_THEIR_OWN = {"text_input", "messages", "input_ids", "sampling_parameters"}
# As other servers' clients send and read them.
INPUT_TYPES = {"max_tokens": "INT32", "top_k": "INT32", "beam_width": "INT32", "temperature": "FP32", "seed": "UINT64"}
OUTPUT_TYPES = {
    "text_output": "STRING",
    "finish_reason": "STRING",
    "num_output_tokens": "UINT32",
    "output_ids": "INT32",
}
NAMES_THAT_BREAK_CLIENTS = {"stop", "index", "is_finished", "stop_reason"}


def configuration(path: str) -> Any:
    text = render_config("m", Face(), "") if path.endswith(".in") else (FOLDER / path).read_text("utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def data_type(tensor: Any) -> str:
    name: str = model_config_pb2.DataType.Name(tensor.data_type)
    return name.removeprefix("TYPE_")


def test_an_alias_of_no_model_does_not_load(tmp_path: Path) -> None:
    with pytest.raises(TritonModelException, match=r"ensemble cannot be served: .*gone/config\.pbtxt"):
        load(tmp_path / "ensemble", alias_of="gone")


def test_an_alias_has_no_settings_of_its_own(model_dir: Path) -> None:
    with pytest.raises(TritonModelException, match="change the settings of model"):
        load(model_dir.parent / "ensemble", alias_of="model", max_batch_size="4")


def load(model_dir: Path, **parameters: str) -> None:
    from limpet.backend.front_end.model import TritonPythonModel

    given = {name: {"string_value": value} for name, value in parameters.items()}
    arguments = {
        "model_repository": str(model_dir),
        "model_instance_name": "m_0",
        "model_config": json.dumps({"parameters": given}),
    }
    TritonPythonModel().initialize(arguments)


def test_every_declared_input_is_optional_and_understood() -> None:
    declared = {tensor.name: tensor for tensor in configuration("model/config.pbtxt.in").input}
    assert all(tensor.optional for tensor in declared.values())
    assert set(declared) - TENSORS_OF_THEIR_OWN <= OPTION_NAMES
    assert set(declared) >= TENSORS_OF_THEIR_OWN
    assert {name: data_type(declared[name]) for name in INPUT_TYPES} == INPUT_TYPES
    assert not NAMES_THAT_BREAK_CLIENTS & set(declared)


def test_outputs_have_the_names_and_types_that_clients_read() -> None:
    config = configuration("model/config.pbtxt.in")
    declared = {tensor.name: tensor for tensor in config.output}
    assert config.max_batch_size == 0
    assert config.model_transaction_policy.decoupled
    assert {name: data_type(declared[name]) for name in OUTPUT_TYPES} == OUTPUT_TYPES
    assert not NAMES_THAT_BREAK_CLIENTS & set(declared)


def test_limpet_admin_takes_and_gives_one_string() -> None:
    config = configuration("limpet_admin/config.pbtxt")
    assert [(tensor.name, data_type(tensor)) for tensor in config.input] == [("request", "STRING")]
    assert [(tensor.name, data_type(tensor)) for tensor in config.output] == [("response", "STRING")]
    assert not config.model_transaction_policy.decoupled


def test_numpy_2_is_refused_before_it_can_do_harm(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "__version__", "2.4.6")
    with pytest.raises(TritonModelException, match=r"numpy 2\.4\.6 .* install numpy<2"):
        load(model_dir)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [({"max_batch": "4"}, "Unknown parameter max_batch"), ({"max_batch_size": "0"}, "Parameter max_batch_size is '0'")],
)
def test_a_wrong_setting_stops_the_load_with_the_reason(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, str], words: str
) -> None:
    monkeypatch.setenv("LIMPET_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(os, "getppid", os.getpid)
    with pytest.raises(TritonModelException, match=f"^model cannot be served: {words}"):
        load(model_dir, **parameters)
    assert not list(runtime_root().glob("*/lock"))


def test_a_damaged_tokenizer_stops_the_load(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMPET_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(os, "getppid", os.getpid)
    (model_dir / "1" / "checkpoint" / "tokenizer.json").write_text("{", "utf-8")
    with pytest.raises(TritonModelException, match=r"tokenizer\.json cannot be read"):
        load(model_dir)


def test_a_folder_without_a_converted_model_stops_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMPET_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(os, "getppid", os.getpid)
    with pytest.raises(TritonModelException, match="convert"):
        load(tmp_path / "nothing")
