"""The converter makes of the chain's Hugging Face folder what the chain's own writer writes."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from limpet.backend.checkpoint import CheckpointDir
from tests.aids.chain_checkpoint import write_chain_checkpoint


@pytest.fixture
def converted(chain_dir: Path) -> CheckpointDir:
    return CheckpointDir(chain_dir)


@pytest.fixture
def direct(tmp_path: Path) -> CheckpointDir:
    return write_chain_checkpoint(tmp_path / "chain")


def test_weights_are_equal(converted: CheckpointDir, direct: CheckpointDir) -> None:
    (one,), (other,) = converted.weight_files(), direct.weight_files()
    weights, expected = load_file(one), load_file(other)
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert np.array_equal(weights[name], weight), name


def test_configurations_and_template_are_equal(converted: CheckpointDir, direct: CheckpointDir) -> None:
    assert converted.model_config() == direct.model_config()
    assert converted.tokenizer_config() == direct.tokenizer_config()
    assert converted.chat_template() == direct.chat_template()
    assert converted.manifest().num_parameters == direct.manifest().num_parameters


@pytest.mark.parametrize("text", ["Say emoji", "你好 chinese", "", "<|user|>long"])
def test_tokenizers_are_equal(converted: CheckpointDir, direct: CheckpointDir, text: str) -> None:
    one, other = (Tokenizer.from_file(str(checkpoint.tokenizer_path)) for checkpoint in (converted, direct))
    for add_special_tokens in (True, False):
        ids = one.encode(text, add_special_tokens=add_special_tokens).ids
        assert ids == other.encode(text, add_special_tokens=add_special_tokens).ids
    assert one.get_vocab() == other.get_vocab()
