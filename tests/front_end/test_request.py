"""Requests as clients send them: what is understood, what is refused and with which words."""

import json
from pathlib import Path
from typing import Any

import pytest

from limpet.backend.checkpoint import GenerationDefaults
from limpet.backend.front_end.errors import RequestError
from limpet.backend.front_end.options import NO_OPS, OPTION_NAMES
from limpet.backend.front_end.request import GenerationRequest, RawRequest, RequestReader, Session
from limpet.backend.link.messages import ModelInfo
from tests.front_end.sample_tokenizers import EOS, byte_level

VOCAB = byte_level().vocab_size
INFO = ModelInfo(engine_pid=1, session_len=512, vocab_size=VOCAB, max_batch_size=4, eos_token_ids=[1])
DEFAULTS = GenerationDefaults(temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.05)


def read(
    text: str | None = "Hi",
    parameters: dict[str, Any] | None = None,
    sampling: Any = None,
    *,
    has_template: bool = True,
    exclude_input: bool = True,
    session: int | str = 0,
    flags: int = 0,
    **tensors: Any,
) -> GenerationRequest:
    given = {name: value if isinstance(value, list) else [value] for name, value in tensors.items()}
    if text is not None:
        given["text_input"] = [text.encode()]
    if sampling is not None:
        source = sampling if isinstance(sampling, str) else json.dumps(sampling)
        given["sampling_parameters"] = [source.encode()]
    reader = RequestReader(byte_level(), DEFAULTS, has_template, exclude_input)
    raw = RawRequest("r", given, parameters or {}, session, flags)
    return reader.read(raw, INFO)


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(RequestError) as refused:
        read(*args, **kwargs)
    assert refused.value.code == "INVALID_ARG"
    assert refused.value.message.endswith(".")
    return refused.value.message


# ---- options


def test_sampling_parameters_outweigh_request_parameters_and_these_single_tensors() -> None:
    tensors = {"temperature": 0.1, "top_k": 1, "max_tokens": 10}
    params = read(parameters={"top_k": 2, "max_tokens": 20}, sampling={"max_tokens": "30"}, **tensors).params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.1, 2, 30)


def test_the_checkpoints_defaults_fill_what_a_request_leaves_open() -> None:
    params = read(sampling={"top_k": 3, "temperature": None}).params
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 3, 0.9)


@pytest.mark.parametrize(
    ("name", "value", "first_name", "understood"),
    [
        ("max_completion_tokens", 3, "max_tokens", 3),
        ("random_seed", "7", "seed", 7),
        ("temperature", "0", "temperature", 0.0),
        ("temperature", 2, "temperature", 2.0),
        ("top_k", 5.0, "top_k", 5),
        ("top_k", -1, "top_k", 0),
        ("top_k", 10**30, "top_k", 0),
        ("max_tokens", 10**9, "max_tokens", 10**9),
        ("max_tokens", 10**400, "max_tokens", 2**31 - 1),
        ("seed", 2**64 - 1, "seed", 2**64 - 1),
        ("min_p", 0.5, "min_p", 0.5),
        ("ignore_eos", "true", "ignore_eos", True),
        ("stop_token_ids", [4, 5, 4], "stop_token_ids", (4, 5)),
        ("stop_token_ids", "[4, 5]", "stop_token_ids", (4, 5)),
        ("end_id", 6, "stop_token_ids", (6,)),
        ("end_id", 10**6, "ignore_eos", True),
        ("end_id", -1, "ignore_eos", True),
    ],
)
def test_values_are_understood_in_every_spelling(name: str, value: Any, first_name: str, understood: Any) -> None:
    assert getattr(read(sampling={name: value}).params, first_name) == understood
    if not isinstance(value, list) and abs(float(str(value).replace("true", "1").replace("[4, 5]", "1"))) < 1e300:
        assert getattr(read(parameters={name: value}).params, first_name) == understood


@pytest.mark.parametrize("top_p", [0, -0.5])
def test_top_p_of_zero_or_less_is_greedy(top_p: float) -> None:
    assert read(top_p=top_p).params.is_greedy


@pytest.mark.parametrize("source", ["tensor", "parameter", "sampling"])
@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_tokens", 0, "whole numbers from 1"),
        ("max_tokens", -1, "whole numbers from 1"),
        ("max_tokens", 2.5, "whole numbers from 1"),
        ("temperature", -1.0, "numbers from 0"),
        ("temperature", float("nan"), "numbers from 0"),
        ("temperature", float("inf"), "numbers from 0"),
        ("temperature", True, "numbers from 0"),
        ("temperature", "warm", "numbers from 0"),
        ("top_p", 1.5, "numbers up to 1"),
        ("min_p", -0.1, "numbers from 0 to 1"),
        ("seed", -1, "whole numbers from 0 to 18446744073709551615"),
        ("ignore_eos", 2, "true, false"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(source: str, name: str, value: Any, allowed: str) -> None:
    given: dict[str, Any] = {"tensor": {name: value}}.get(source, {})
    message = refusal(
        parameters={name: value} if source == "parameter" else None,
        sampling={name: value} if source == "sampling" else None,
        **given,
    )
    assert message.startswith(f"{name} is ")
    assert message.endswith(f"allowed: {allowed}.")


@pytest.mark.parametrize(
    ("names", "unknown", "meant"), [({"temprature": 1}, "temprature", "temperature"), ({"xyzzy": 1}, "xyzzy", None)]
)
def test_an_unknown_name_is_an_error_that_names_it(names: dict[str, Any], unknown: str, meant: str | None) -> None:
    for message in (refusal(sampling=names), refusal(parameters=names)):
        assert f"{unknown!r}" in message
        assert ("did you mean" in message) == (meant is not None)
        assert meant is None or meant in message


def test_one_option_under_two_names_must_agree() -> None:
    assert read(sampling={"max_tokens": 4, "max_completion_tokens": 4}).params.max_tokens == 4
    assert "same option" in refusal(sampling={"max_tokens": 4, "max_completion_tokens": 5})


def test_parameters_that_are_not_ours_are_ignored() -> None:
    parameters = {"id": "1", "Streaming": True, "triton_enable_empty_final_response": True, "priority": 3}
    assert read(parameters=parameters).request_id == "r"


@pytest.mark.parametrize("option", [option for option in NO_OPS if option.allowed], ids=lambda option: option.name)
def test_options_without_effect_are_accepted_only_at_their_no_op_value(option: Any) -> None:
    for name in (option.name, *option.aliases):
        for value in option.allowed:
            read(sampling={name: value})
        assert "not supported yet; allowed: " in refusal(sampling={name: 77.5})


def test_options_of_no_meaning_here_are_accepted_at_any_value() -> None:
    read(sampling={"length_penalty": 1.7, "accumulate_tokens": True, "pad_id": 99}, bad_words=[b"", b""])


def test_penalties_come_from_the_request_else_the_checkpoint() -> None:
    params = read().params
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.05, 0.0, 0.0)
    given = {"repetition_penalty": 1, "presence_penalty": -1, "frequency_penalty": "0.5"}
    params = read(sampling=given).params
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, -1.0, 0.5)
    for wrong in ({"repetition_penalty": 0}, {"presence_penalty": 101}, {"frequency_penalty": "much"}):
        assert "allowed: numbers from" in refusal(sampling=wrong)


def test_min_tokens_has_two_names_and_ends_at_max_tokens() -> None:
    assert read(min_length=5).params.min_tokens == 5
    assert read(min_tokens=50).params.max_tokens == 50, "a raw prompt's own limit gives way"
    assert "up to max_tokens, which is 4" in refusal(min_tokens=5, max_tokens=4)


def test_logit_bias_is_checked_id_by_id() -> None:
    assert read(sampling={"logit_bias": {"3": -100, "4": "2.5"}}).params.logit_bias == ((3, -100.0), (4, 2.5))
    assert read(parameters={"logit_bias": '{"3": 1}'}).params.logit_bias == ((3, 1.0),)
    for token in (-1, VOCAB, 2**40):
        assert f"0 to {VOCAB - 1}" in refusal(sampling={"logit_bias": {str(token): 1}})
    for wrong in ([1], {"a": 1}, {"3": 101}, {"3": None}, {"3": "nan"}):
        assert "logit_bias" in refusal(sampling={"logit_bias": wrong})


def test_bad_words_are_banned_with_and_without_a_space_before_them() -> None:
    encode = byte_level().encode_segment
    expected = (tuple(encode("no")), tuple(encode(" no")))
    assert read(bad_words=[b"no", b"", b" no"]).params.bad_words == expected
    assert read(parameters={"bad_words": "no"}).params.bad_words == expected


def test_every_option_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text("utf-8")
    assert not [name for name in OPTION_NAMES if f"`{name}`" not in text]


def test_asking_for_logprobs_switches_their_output_on() -> None:
    nothing = read()
    assert (nothing.params.logprobs, nothing.params.prompt_logprobs) == (None, None)
    asked = read(sampling={"logprobs": 3, "prompt_logprobs": 0})
    assert (asked.params.logprobs, asked.params.prompt_logprobs) == (3, 0)
    assert (asked.outputs.logprobs, asked.outputs.prompt_logprobs) == (True, True)
    switched_off = read(sampling={"logprobs": 3, "return_logprobs": False})
    assert (switched_off.params.logprobs, switched_off.outputs.logprobs) == (None, False)
    for switch in ("return_logprobs", "return_cumulative_logprob", "return_log_probs"):
        assert read(parameters={switch: True}).params.logprobs == 0
    assert "0 to 20" in refusal(sampling={"logprobs": 21})


@pytest.mark.parametrize("stops", [None, [], [""], ""])
def test_empty_stop_strings_mean_none(stops: Any) -> None:
    assert read(sampling={"stop": stops}).stop_strings == ()


def test_stop_strings_come_as_tensor_parameter_or_in_the_json() -> None:
    assert read(stop_words=[b"a", b"", "é".encode()]).stop_strings == ("a", "é")
    assert read(parameters={"stop": "x"}).stop_strings == ("x",)
    assert read(sampling={"stop": ["x", "y"]}, stop_words=[b"a"]).stop_strings == ("x", "y")
    assert "up to 64 strings" in refusal(sampling={"stop": ["x"] * 65})


def test_a_stop_string_that_is_a_special_token_stops_by_its_id() -> None:
    assert read(sampling={"stop": EOS}).params.stop_token_ids == (byte_level().special_id(EOS),)


def test_every_request_without_a_seed_draws_its_own() -> None:
    assert read().params.seed != read().params.seed


@pytest.mark.parametrize("source", ["{", "[1]", '"x"', '{"stop": "\\ud800"}', "[" * 100_000])
def test_sampling_parameters_must_be_a_json_object(source: str) -> None:
    assert refusal(sampling=source).startswith("sampling_parameters ")


# ---- content


def test_text_is_raw_without_a_session_and_a_chat_turn_with_one() -> None:
    raw, turn = read(), read(session="s")
    assert raw.content is not None
    assert turn.content is not None
    assert raw.content.text == "Hi"
    assert turn.content.messages == [{"role": "user", "content": "Hi"}]
    assert (raw.params.max_tokens, turn.params.max_tokens) == (16, None)


def test_apply_chat_template_decides_where_it_is_given() -> None:
    wrapped = read(parameters={"apply_chat_template": True}).content
    appended = read(session=7, parameters={"apply_chat_template": False}).content
    assert wrapped is not None
    assert appended is not None
    assert wrapped.messages
    assert appended.text == "Hi"


def test_without_a_template_a_session_is_raw() -> None:
    content = read(session=7, has_template=False).content
    assert content is not None
    assert content.text == "Hi"


def test_messages_are_a_chat_of_their_own() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "ü"}]
    request = read("", messages=json.dumps(messages).encode())
    assert request.content is not None
    assert request.content.messages == messages
    assert request.session is None


@pytest.mark.parametrize(
    "messages",
    ["", "{}", "[]", "[1]", '[{"role": "user"}]', '[{"role": "user", "content": null}]', "[",
     '[{"role": "", "content": "x"}]', '[{"role": "user", "content": "x", "tool": 1}]',
     '[{"role": "user", "content": "\\udfff"}]'],
)  # fmt: skip
def test_malformed_messages_are_refused(messages: str) -> None:
    refusal(None, messages=messages.encode())


@pytest.mark.parametrize(
    "request_of",
    [{"text": ""}, {"text": None}, {"text": None, "input_ids": []}, {"text": "Hi", "input_ids": [1]},
     {"text": None, "input_ids": [1], "messages": b"[]"}],
)  # fmt: skip
def test_exactly_one_prompt_is_needed(request_of: dict[str, Any]) -> None:
    assert "exactly one of text_input, messages and input_ids" in refusal(**request_of)


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    assert f"allowed: 0 to {VOCAB - 1}" in refusal(None, input_ids=[0, token_id])
    assert f"allowed: 0 to {VOCAB - 1}" in refusal(sampling={"stop_token_ids": [token_id]})
    assert read(None, input_ids=[0, VOCAB - 1]).content is not None


def test_invalid_utf8_is_refused() -> None:
    assert "valid UTF-8 (at byte 1)" in refusal(None, text_input=[b"a\xff"])
    assert "valid UTF-8" in refusal(stop_words=[b"\xc3"])


def test_a_text_longer_than_any_tokens_of_the_context_is_refused_with_the_numbers() -> None:
    message = refusal("a" * 2_000_000)
    assert "2000000 characters" in message
    assert "session_len = 512" in message


def test_several_elements_where_one_is_allowed_are_refused() -> None:
    assert "temperature has 2 elements; allowed: 1." in refusal(temperature=[1.0, 2.0])


# ---- sessions


@pytest.mark.parametrize(
    ("correlation_id", "parameters", "session_id"),
    [(7, {}, "7"), ("7", {}, "7"), (0, {"sequence_id": 7}, "7"), ("", {"sequence_id": "seven"}, "seven"),
     (7, {"sequence_id": 8}, "7"), (0, {}, None), ("0", {}, None), (0, {"sequence_id": 0}, None), ("", {}, None)],
)  # fmt: skip
def test_the_session_is_tritons_sequence_id(
    correlation_id: int | str, parameters: dict[str, Any], session_id: str | None
) -> None:
    session = read(session=correlation_id, parameters=parameters).session
    assert (session.session_id if session else None) == session_id


def test_start_and_end_come_as_flags_or_as_parameters() -> None:
    parameters = {"sequence_id": 7, "sequence_start": True, "session_tokens": 0, "session_rewind": 0}
    assert read(parameters=parameters).session == Session("7", True, False, 0, 0)
    assert read(session=7, flags=3).session == Session("7", True, True, None, 0)


def test_end_with_empty_text_generates_nothing() -> None:
    assert read("", session=7, flags=2).content is None
    refusal("", session=7, flags=1)


def test_session_that_begins_has_nothing_to_cut() -> None:
    assert "session_rewind with sequence_start" in refusal(session=7, flags=1, parameters={"session_rewind": 1})
    parameters = {"sequence_id": 7, "sequence_start": True, "session_tokens": 5, "session_rewind": 1}
    assert "session_tokens and session_rewind with sequence_start" in refusal(parameters=parameters)


def test_session_parameters_without_a_session_are_refused() -> None:
    assert "needs a sequence_id" in refusal(parameters={"session_rewind": 1})


def test_a_session_id_is_at_most_128_characters_long() -> None:
    assert read(parameters={"sequence_id": "x" * 128}).session is not None
    assert "129 characters; allowed: 128" in refusal(parameters={"sequence_id": "x" * 129})


# ---- the prompt in the answer


@pytest.mark.parametrize(
    ("exclude_input", "asked", "stream", "prepended"),
    [(True, None, False, ""), (False, None, False, "Hi"), (False, True, False, ""), (True, False, False, "Hi"),
     (False, None, True, "")],
)  # fmt: skip
def test_the_prompt_is_prepended_by_the_request_or_the_models_rule(
    exclude_input: bool, asked: bool | None, stream: bool, prepended: str
) -> None:
    tensors = {} if asked is None else {"exclude_input_in_output": asked}
    assert read(exclude_input=exclude_input, stream=stream, **tensors).prepended_text == prepended
