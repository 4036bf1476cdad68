"""The chain checkpoint does what its scripts say, by transformers' own Llama and the tokenizers library."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.aids.chain import MIN_LOGIT_GAP, answer_ids, codes, next_tokens, script
from tests.aids.chain_checkpoint import write_chain_huggingface
from tests.aids.chain_scripts import DEFAULT, NUM_LONG_WORDS, SCRIPTS
from tests.aids.chain_tokenizer import BOS_ID, EOS_ID, build_tokenizer

KEYS = [each.key for each in SCRIPTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chain") / "huggingface"
    write_chain_huggingface(folder)
    return folder


@pytest.fixture(scope="module")
def logits_of_every_token(folder: Path) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.arange(len(next_tokens()))[:, None]).logits[:, 0]
    return logits  # [vocab, vocab]


def test_transformers_computes_the_map_with_a_wide_margin(logits_of_every_token: torch.Tensor) -> None:
    top = logits_of_every_token.topk(2)
    assert top.indices[:, 0].tolist() == next_tokens().tolist()
    assert (top.values[:, 0] - top.values[:, 1]).min().item() >= MIN_LOGIT_GAP


def test_codes_are_distinct() -> None:
    assert len({code.tobytes() for code in codes()}) == len(codes())


@pytest.mark.parametrize("key", KEYS)
def test_the_key_starts_its_script_and_the_ids_decode_to_its_text(key: str) -> None:
    tokenizer = build_tokenizer()
    prompt = tokenizer.encode(f"Please, {key}").ids
    assert prompt[0] == BOS_ID
    expected = answer_ids(key)
    emitted = [int(next_tokens()[prompt[-1]])]
    while len(emitted) < len(expected):
        emitted.append(int(next_tokens()[emitted[-1]]))
    assert emitted == expected
    assert tokenizer.decode(emitted) == script(key).text


@pytest.mark.parametrize(
    "prompt", ["", "What is a limpet?", "你好", "🎉", "a line\n", "word1", "Hello", "the", "long "]
)
def test_a_prompt_without_a_key_starts_the_default_script(prompt: str) -> None:
    last = build_tokenizer().encode(prompt).ids[-1]
    assert next_tokens()[last] == answer_ids(DEFAULT.key)[0]


def test_the_loop_never_ends() -> None:
    ids = answer_ids("loop")
    assert EOS_ID not in ids
    assert next_tokens()[ids[-1]] == ids[0]


def test_scripts_hold_what_they_are_for() -> None:
    def is_whole(piece: bytes) -> bool:
        return "\ufffd" not in piece.decode(errors="replace")

    assert sum(not is_whole(piece) for piece in script("emoji").pieces) >= 10
    assert sum(not is_whole(piece) for piece in script("chinese").pieces) >= 10
    assert script("spaces").text.startswith("  ")
    assert script("broken").text.count("\ufffd") == 2
    assert len(script("long").text.split()) == NUM_LONG_WORDS
    assert script("empty").text == ""


def test_the_template_is_append_only_and_keeps_the_key_last(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say emoji"},
        {"role": "assistant", "content": "😀"},
        {"role": "user", "content": "chinese"},
    ]

    def ids(count: int) -> Any:
        return tokenizer.apply_chat_template(messages[:count], add_generation_prompt=True, return_dict=False)

    assert next_tokens()[ids(2)[-1]] == answer_ids("emoji")[0]
    assert next_tokens()[ids(4)[-1]] == answer_ids("chinese")[0]
    assert ids(4)[: len(ids(2))] == ids(2)
    assert ids(4).count(BOS_ID) == 1
