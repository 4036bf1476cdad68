"""The prompts of turns, against transformers' apply_chat_template over the whole conversation."""

from collections.abc import Sequence

import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from limpet.backend.chat_template import ChatTemplate, TemplateError
from limpet.backend.checkpoint import TokenizerConfig
from limpet.backend.front_end.conversation import Conversation
from limpet.backend.link.messages import TurnBegun, TurnView, pack_ids
from limpet.backend.tokenizer import Tokenizer
from tests.front_end.sample_templates import CHATML, LLAMA2, QWEN3_LIKE, TEMPLATES
from tests.front_end.sample_tokenizers import BOS, EOS, byte_level, sentencepiece

APPEND_ONLY = ["chatml", "llama 2", "llama 3", "deepseek v2"]
BEGIN_WITH_SPACE = ["llama 2", "deepseek v2"]  # there a model's answer begins with the space before it
CONFIG = TokenizerConfig(bos_token=BOS, eos_token=EOS)
USER_TEXTS = ["  Hello, limpet <there>! 你好 ", "And a second\nquestion?", "The third."]
ANSWERS = ["I sit on a rock.", "Second answer 😀.", "Third."]


def conversation_of(template: str | None, tokenizer: Tokenizer) -> Conversation:
    return Conversation(tokenizer, ChatTemplate(template, CONFIG) if template else None)


def dialogue(num_answers: int) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = []
    for text, answer in zip(USER_TEXTS, ANSWERS, strict=True):
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    return messages[: 2 * num_answers + 1]


def view(text: str, reply: list[int]) -> TurnView:
    messages = msgspec.json.encode([{"role": "user", "content": text}]).decode()
    return TurnView(messages=messages, reply=pack_ids(reply))


def begun(views: Sequence[TurnView], head: Sequence[int] = ()) -> TurnBegun:
    return TurnBegun(key=1, history_len=0, head=pack_ids(list(head)), turns=list(views))


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def reference_text(template: str, messages: list[dict[str, str]], tokenizer: Tokenizer) -> str:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, bos_token=BOS, eos_token=EOS)
    fast.chat_template = template
    text: str = fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("num_answers", [0, 1, 2])
def test_templates_render_as_in_transformers(name: str, num_answers: int) -> None:
    messages = dialogue(num_answers)
    assert ChatTemplate(TEMPLATES[name], CONFIG).render(messages) == reference_text(
        TEMPLATES[name], messages, byte_level()
    )


@pytest.mark.parametrize("name", APPEND_ONLY)
def test_a_stateless_chat_has_the_ids_of_its_rendered_text(name: str) -> None:
    tokenizer = byte_level()
    text = reference_text(TEMPLATES[name], dialogue(2), tokenizer)
    expected = tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert conversation_of(TEMPLATES[name], tokenizer).turn(begun([]), dialogue(2)).ids == expected


@pytest.mark.parametrize("name", APPEND_ONLY)
@pytest.mark.parametrize("ends", [True, False])
def test_each_turn_continues_the_ids_of_the_turn_before(name: str, ends: bool) -> None:
    tokenizer = byte_level()
    conversation = conversation_of(TEMPLATES[name], tokenizer)
    views: list[TurnView] = []
    history: list[int] = []
    turn_ends: list[int] = []
    for text in USER_TEXTS:
        prompt = conversation.turn(begun(views), user(text))
        assert prompt.ids[: len(history)] == history
        assert prompt.turn_ends == turn_ends
        # Ids that no tokenizer would give for their text: only splicing can keep them.
        reply = [tokenizer.backend.token_to_id(char) for char in "Ġrock"]
        reply += [tokenizer.backend.token_to_id(EOS)] if ends else []
        history = [*prompt.ids, *reply]
        turn_ends.append(len(history))
        views.append(view(text, reply))


@pytest.mark.parametrize("name", APPEND_ONLY)
def test_the_last_turn_reads_as_the_whole_conversation_rendered(name: str) -> None:
    tokenizer = byte_level()
    conversation = conversation_of(TEMPLATES[name], tokenizer)
    space = " " if name in BEGIN_WITH_SPACE else ""
    views = [
        view(text, tokenizer.encode_segment(space + answer))
        for text, answer in zip(USER_TEXTS[:2], ANSWERS[:2], strict=True)
    ]
    prompt = conversation.turn(begun(views), user(USER_TEXTS[2]))
    decoded = tokenizer.backend.decode(prompt.ids, skip_special_tokens=False)
    assert decoded == reference_text(TEMPLATES[name], dialogue(2), tokenizer)


@pytest.mark.parametrize(
    ("template", "end_mark", "next_message"),
    [(CHATML.replace("<|im_end|>", EOS), EOS, "\n<|im_start|>user"), (LLAMA2, f" {EOS}", f"{BOS}[INST] More")],
)
def test_an_end_mark_that_the_model_produced_is_not_doubled(template: str, end_mark: str, next_message: str) -> None:
    tokenizer = byte_level()
    end = tokenizer.backend.token_to_id(EOS)
    conversation = conversation_of(template, tokenizer)
    reply = tokenizer.encode_segment("I sit.")
    stopped = conversation.turn(begun([view("Hi", [*reply, end])]), user("More"))
    cut = conversation.turn(begun([view("Hi", reply)]), user("More"))
    history = [*conversation.turn(begun([]), user("Hi")).ids, *reply]
    assert stopped.ids[: len(history) + 1] == [*history, end]
    for prompt, expected in ((stopped, next_message), (cut, end_mark + next_message)):
        after = tokenizer.backend.decode(prompt.ids[prompt.turn_ends[0] :], skip_special_tokens=False)
        assert after.startswith(expected)


def test_a_reply_that_the_template_changes_is_rendered_as_the_template_wants() -> None:
    tokenizer = byte_level()
    conversation = conversation_of(QWEN3_LIKE, tokenizer)
    thoughtful = "<think>\nrocks?\n</think>\n\n I sit on a rock. \n"
    views = [view(USER_TEXTS[0], tokenizer.encode_segment(thoughtful)), view(USER_TEXTS[1], [300, 301, 302])]
    prompt = conversation.turn(begun(views), user(USER_TEXTS[2]))
    second = tokenizer.decode([300, 301, 302])
    messages = dialogue(2)
    messages[1] = {"role": "assistant", "content": thoughtful}
    messages[3] = {"role": "assistant", "content": second}
    expected = reference_text(QWEN3_LIKE, messages, tokenizer)
    assert tokenizer.backend.decode(prompt.ids, skip_special_tokens=False) == expected
    assert prompt.ids[prompt.turn_ends[1] - 3 : prompt.turn_ends[1]] == [300, 301, 302]


def test_the_end_of_a_changed_reply_is_found_where_its_text_survives() -> None:
    tokenizer = byte_level()
    conversation = conversation_of(QWEN3_LIKE, tokenizer)
    prompt = conversation.turn(
        begun([view("Hi", tokenizer.encode_segment("<think>\nrocks?\n</think>\n\nI sit."))]), user("More")
    )
    kept = tokenizer.backend.decode(prompt.ids[: prompt.turn_ends[0]], skip_special_tokens=False)
    assert kept == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nI sit."


@pytest.mark.parametrize("template", [CHATML, QWEN3_LIKE])
def test_a_raw_turn_appends_to_the_history_as_it_is(template: str) -> None:
    tokenizer = byte_level()
    conversation = conversation_of(template, tokenizer)
    thoughtful = tokenizer.encode_segment("<think>\nrocks?\n</think>\n\nI sit.")
    views = [view("Hi", thoughtful), view("Go on", thoughtful)]
    history = [*conversation.turn(begun(views[:1]), user("Go on")).ids, *thoughtful]
    assert conversation.raw_turn(begun(views), " and then", []).ids == [
        *history,
        *tokenizer.encode_segment(" and then"),
    ]
    assert conversation.raw_turn(begun(views), None, [7, 8]).ids == [*history, 7, 8]


def test_a_templated_turn_after_a_raw_one_continues_its_ids() -> None:
    tokenizer = byte_level()
    conversation = conversation_of(CHATML, tokenizer)
    head = [*tokenizer.encode_segment("Once upon a tide"), 300]
    prompt = conversation.turn(begun([view("Go on", [301, 302])], head), user("And?"))
    after_head = "<|im_end|>\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"
    rest = "<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    until_reply = [*head, *tokenizer.encode_segment(after_head)]
    assert prompt.ids == [*until_reply, 301, 302, *tokenizer.encode_segment(rest)]
    assert prompt.turn_ends == [len(until_reply) + 2]


@pytest.mark.parametrize("template", [LLAMA2, CHATML, None])
def test_a_context_begins_with_exactly_one_bos(template: str | None) -> None:
    tokenizer = sentencepiece(adds_bos=True)
    conversation = conversation_of(template, tokenizer)
    if template:
        prompts = [conversation.turn(begun([]), user("Hi")).ids]
    else:
        prompts = [conversation.raw_turn(begun([]), "Hi", []).ids, tokenizer.encode_prompt(f"{BOS}Hi")]
    for ids in prompts:
        assert ids[0] == tokenizer.bos_id
        assert ids.count(tokenizer.bos_id) == 1


def test_a_later_raw_turn_gets_no_bos() -> None:
    tokenizer = sentencepiece(adds_bos=True)
    prompt = conversation_of(None, tokenizer).raw_turn(begun([], head=[tokenizer.bos_id or 0, 300]), "more", [])
    assert prompt.ids.count(tokenizer.bos_id) == 1


def test_messages_without_a_template_are_refused() -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        conversation_of(None, byte_level()).turn(begun([]), user("Hi"))


def test_the_templates_own_refusal_is_the_reason() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        conversation_of(LLAMA2, byte_level()).turn(begun([]), [*user("Hi"), *user("Hi again")])
