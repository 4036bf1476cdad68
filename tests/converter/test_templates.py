"""The built-in chat templates write their models' formats, and a session's turns give the same ids as the whole."""

import json
from pathlib import Path

import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from limpet.backend.chat_template import ChatTemplate
from limpet.backend.front_end.conversation import Conversation
from limpet.backend.link.messages import TurnBegun, TurnView, pack_ids
from limpet.backend.tokenizer import Tokenizer
from tests.converter.checkpoints import run_convert
from tests.converter.families import build, write_folder
from tests.converter.vocabularies import train_byte_level

BOS, EOS = "<s>", "</s>"
SPECIAL = (
    *(BOS, EOS, "<|im_start|>", "<|im_end|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who lives on the rock?"},
    {"role": "assistant", "content": "A limpet."},
    {"role": "user", "content": "Always? 你好 😀"},
]
# As the models' cards give them.
EXPECTED = {
    "llama2": (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWho lives on the rock? [/INST] A limpet. </s>"
        "<s>[INST] Always? 你好 😀 [/INST]"
    ),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWho lives on the rock?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA limpet.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAlways? 你好 😀<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho lives on the rock?<|im_end|>\n"
        "<|im_start|>assistant\nA limpet.<|im_end|>\n<|im_start|>user\nAlways? 你好 😀<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "deepseek-v2": (
        "<s>Be brief.\n\nUser: Who lives on the rock?\n\nAssistant: A limpet.</s>User: Always? 你好 😀\n\nAssistant:"
    ),
}
END_OF_TURN = {"llama2": EOS, "llama3": "<|eot_id|>", "chatml": "<|im_end|>", "deepseek-v2": EOS}
# These write a space before a reply that a generation prompt does not have: the model's own ids begin with it.
SPACE_BEFORE_REPLY = ("llama2", "deepseek-v2")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder whose vocabulary has every template's special tokens."""
    write_folder(tmp_path / "source", build("meta"))
    train_byte_level(SPECIAL).save(str(tmp_path / "source/tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "source/tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return tmp_path / "source"


@pytest.mark.parametrize("name", EXPECTED)
def test_template_writes_the_models_format(tmp_path: Path, source: Path, name: str) -> None:
    checkpoint = run_convert(source, tmp_path, "--chat-template", name)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(checkpoint.tokenizer_path), bos_token=BOS, eos_token=EOS)
    tokenizer.chat_template = checkpoint.chat_template()
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    assert text == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_end_of_a_turn_is_an_end_id(tmp_path: Path, source: Path, name: str) -> None:
    checkpoint = run_convert(source, tmp_path, "--chat-template", name)
    assert SPECIAL.index(END_OF_TURN[name]) in checkpoint.model_config().eos_token_ids


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "cut"])
def test_ids_of_every_turn_are_the_template_with_the_models_own_ids_spliced_in(
    tmp_path: Path, source: Path, name: str, ended: bool
) -> None:
    checkpoint = run_convert(source, tmp_path, "--chat-template", name)
    tokenizer = Tokenizer.load(checkpoint)
    template = ChatTemplate(str(checkpoint.chat_template()), tokenizer.config)
    conversation = Conversation(tokenizer, template)
    questions = ["Who lives on the rock?", "Always?", "And at low tide? 😀"]
    replies = ["Limpet number one", "Limpet number two"]
    space, end = (" " if name in SPACE_BEFORE_REPLY else ""), (END_OF_TURN[name] if ended else "")
    reply_ids = [tokenizer.encode_segment(space + reply + end) for reply in replies]
    views = [
        TurnView(messages=_user(question), reply=pack_ids(ids))
        for question, ids in zip(questions, reply_ids, strict=False)
    ]
    for num_replies in range(3):
        begun = TurnBegun(key=1, history_len=0, head=pack_ids([]), turns=views[:num_replies])
        found = conversation.turn(begun, msgspec.json.decode(_user(questions[num_replies]))).ids
        messages = [{"role": "user", "content": questions[0]}]
        for question, reply in list(zip(questions[1:], replies, strict=True))[:num_replies]:
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": question}]
        rest, expected = template.render(messages), list[int]()
        for reply, ids in list(zip(replies, reply_ids, strict=True))[:num_replies]:
            before, rest = rest.split(space + reply)
            expected += tokenizer.encode_segment(before) + ids
            rest = rest.removeprefix(" ").removeprefix(end) if ended else rest
        assert found == expected + tokenizer.encode_segment(rest), num_replies


def _user(text: str) -> str:
    return msgspec.json.encode([{"role": "user", "content": text}]).decode()
