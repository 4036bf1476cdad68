"""One request from acceptance to FINAL, with an engine played by the test."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from limpet.backend.link.messages import (
    Abandon,
    BeginTurn,
    CancelRequested,
    EndSession,
    Failed,
    Message,
    Outputs,
    PollCancel,
    Settle,
    Settled,
    StillRunning,
    TokenOutput,
    TurnBegun,
    TurnView,
    pack_ids,
    unpack_ids,
)
from tests.front_end.conftest import Stage
from tests.front_end.fake_triton import FakeSender
from tests.front_end.sample_tokenizers import EOS

START, END = 1, 2
SWITCHES = [
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_num_cached_tokens",
    "return_output_ids",
    "return_session_tokens",
]
ALL_OUTPUTS = dict.fromkeys(SWITCHES, True)


def texts(sender: FakeSender) -> list[str]:
    return [response.text for response in sender.all()]


def error_of(sender: FakeSender) -> tuple[str, str]:
    error = sender.all()[-1].error
    assert error is not None
    return error.code, error.message


def half_a_character(stage: Stage) -> int:
    """The token of the first byte of an emoji."""
    token_id: int = stage.tokenizer.backend.token_to_id("ð")
    return token_id


# ---- answers


def test_a_stream_gets_each_step_and_one_final_response_with_tensors(stage: Stage) -> None:
    sender = stage.ask(stream=True)
    key = stage.submitted().key
    for number, piece in enumerate(["The ", "limpet"], 1):
        stage.generate(key, piece)
        sender.wait_for(number)
    stage.generate(key, ids=[stage.tokenizer.special_id(EOS)], reason="stop")
    assert texts(sender) == ["The ", "limpet", ""]


def test_without_stream_exactly_one_response_comes(stage: Stage) -> None:
    sender = stage.ask(stream=False)
    key = stage.submitted().key
    for piece in ("The ", "limpet"):
        stage.generate(key, piece)
    stage.generate(key, " sits", "length")
    assert texts(sender) == ["The limpet sits"]


def test_what_arrives_while_a_send_is_under_way_goes_out_together(stage: Stage) -> None:
    sender = stage.ask(stream=True)
    key = stage.submitted().key
    other = stage.ask(stream=True)
    other_key = stage.submitted().key
    sender.gate.clear()
    for piece in ("a", "b", "c", "d"):
        stage.generate(key, piece)
        stage.generate(other_key, piece)
    stage.generate(other_key, "e", "length")
    assert "".join(texts(other)) == "abcde"  # another stream, on another thread, is not held up
    sender.gate.set()
    stage.generate(key, "e", "length")
    received = texts(sender)
    assert "".join(received) == "abcde"
    assert len(received) <= 3


def test_no_delta_holds_half_a_character(stage: Stage) -> None:
    sender = stage.ask(stream=True)
    key = stage.submitted().key
    for token_id in stage.tokenizer.encode_segment("a 🏴 你好 b"):
        stage.generate(key, ids=[token_id])
    stage.generate(key, "", "length")
    assert "".join(texts(sender)) == "a 🏴 你好 b"
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts(sender))


def test_the_outputs_asked_for_are_in_every_response(stage: Stage) -> None:
    sender = stage.ask("Hi there", stream=True, **ALL_OUTPUTS)
    submit = stage.submitted()
    first = stage.generate(submit.key, "The cat")
    sender.wait_for(1)
    last = stage.generate(submit.key, " sat", "length")
    responses = sender.all()
    assert [response.value("finish_reason") for response in responses] == [b"None", b"length"]
    assert [response.value("output_ids") for response in responses] == [first, last]
    assert [response.value("num_output_tokens") for response in responses] == [len(first), len(last)]
    num_input = len(stage.tokenizer.encode_prompt("Hi there"))
    assert {response.value("num_input_tokens") for response in responses} == {num_input}
    assert {response.value("num_cached_tokens") for response in responses} == {3}
    assert submit.prompt == pack_ids(stage.tokenizer.encode_prompt("Hi there"))


def test_outputs_not_asked_for_are_absent(stage: Stage) -> None:
    sender = stage.ask()
    stage.generate(stage.submitted().key, "x", "length")
    assert list(sender.all()[0].outputs) == ["text_output"]


def test_a_token_that_ends_the_answer_is_counted_and_not_shown(stage: Stage) -> None:
    sender = stage.ask(return_output_ids=True, sampling_parameters=json.dumps({"stop_token_ids": [70]}))
    submit = stage.submitted()
    assert submit.params.stop_token_ids == (70,)
    stage.generate(submit.key, ids=[60, 70], reason="stop")
    (response,) = sender.all()
    assert response.text == stage.tokenizer.decode([60])
    assert response.value("output_ids") == [60, 70]


def test_a_broken_character_at_the_end_is_shown_as_such(stage: Stage) -> None:
    sender = stage.ask(stream=True)
    stage.generate(stage.submitted().key, ids=[half_a_character(stage)], reason="length")
    assert texts(sender) == ["\N{REPLACEMENT CHARACTER}"]


def test_the_prompt_comes_first_where_the_request_wants_it(stage: Stage) -> None:
    sender = stage.ask("Once ", exclude_input_in_output=False)
    stage.generate(stage.submitted().key, "upon", "length")
    assert texts(sender) == ["Once upon"]


# ---- stop strings


def test_a_stop_string_across_tokens_is_held_back_and_never_shown(stage: Stage) -> None:
    sender = stage.ask(stream=True, stop_words=["STOP"], return_finish_reason=True)
    key = stage.submitted().key
    for piece in ("one S", "T", "OP and more"):
        stage.generate(key, piece)
    assert "".join(texts(sender)) == "one "
    assert sender.responses[-1].value("finish_reason") == b"stop"
    assert stage.engine.expect(Settle).keep <= len(stage.tokenizer.encode_segment("one S"))


def test_text_held_back_for_a_stop_string_is_flushed_at_the_end(stage: Stage) -> None:
    sender = stage.ask(stream=True, stop_words=["STOP"])
    key = stage.submitted().key
    stage.generate(key, "one ST")
    stage.generate(key, "O", "length")
    assert "".join(texts(sender)) == "one STO"


def test_a_session_is_cut_at_the_stop_string_before_final(stage: Stage) -> None:
    sender = stage.ask(session="s", flags=START, stream=True, stop_words=["STOP"], **ALL_OUTPUTS)
    submit = stage.turn_submitted()
    kept = stage.generate(submit.key, "one ")
    stage.generate(submit.key, "STOP")
    settle = stage.engine.expect(Settle)
    assert (settle.key, settle.keep, settle.cancelled) == (submit.key, len(kept), False)
    assert not sender.is_final
    stage.engine.send(Settled(submit.key, len(unpack_ids(submit.prompt)) + len(kept)))
    assert "".join(texts(sender)) == "one "
    assert sender.responses[-1].value("session_tokens") == len(unpack_ids(submit.prompt)) + len(kept)
    assert [token for response in sender.responses for token in response.value("output_ids")] == kept


# ---- sessions


def test_a_turn_is_built_from_the_sessions_history(stage: Stage) -> None:
    sender = stage.ask("More", session=7, stream=True, **ALL_OUTPUTS)
    begin = stage.engine.expect(BeginTurn)
    assert begin == BeginTurn(begin.key, "7", False, False)
    earlier = json.dumps([{"role": "user", "content": "Hi"}])
    stage.engine.send(TurnBegun(begin.key, 40, b"", [TurnView(earlier, pack_ids([300, 301]))]))
    submit = stage.submitted()
    prompt = unpack_ids(submit.prompt)
    assert prompt[submit.turn_ends[0] - 2 : submit.turn_ends[0]] == [300, 301]
    assert msgspec.json.decode(submit.messages or "") == [{"role": "user", "content": "More"}]
    reply = stage.generate(submit.key, "Yes.", "stop", ids=[400, 401])
    settle = stage.engine.expect(Settle)
    assert (settle.keep, settle.cancelled) == (len(reply), False)
    (last,) = sender.all()
    assert last.value("num_input_tokens") == len(prompt) - 40
    assert last.value("session_tokens") == len(prompt) + 2


def test_start_end_and_cuts_reach_the_engine(stage: Stage) -> None:
    stage.ask(session="t", flags=START | END)
    begin = stage.engine.expect(BeginTurn)
    assert begin == BeginTurn(begin.key, "t", True, True)
    sender = stage.ask(session="s", flags=END, parameters={"session_tokens": 5, "session_rewind": 1})
    begin = stage.engine.expect(BeginTurn)
    assert begin == BeginTurn(begin.key, "s", False, True, 5, 1)
    stage.engine.send(Failed(begin.key, "UNAVAILABLE", "Session busy."))
    assert error_of(sender) == ("UNAVAILABLE", "Session busy.")


def test_a_session_is_ended_without_a_turn(stage: Stage) -> None:
    sender = stage.ask("", session="s", flags=END)
    end = stage.engine.expect(EndSession)
    assert end.session_id == "s"
    stage.engine.send(Settled(end.key, 0))
    assert texts(sender) == [""]


def test_delivered_tokens_are_reported_to_the_engine(stage: Stage) -> None:
    sender = stage.ask(session="s", flags=START, stream=True)
    key = stage.turn_submitted().key
    complete = stage.generate(key, "one two")
    sender.wait_for(1)
    stage.generate(key, ids=[half_a_character(stage)])  # half a character: not delivered
    stage.generate(key, ids=[])
    stage.engine.send(PollCancel(key))
    stage.engine.expect(StillRunning)
    assert stage.engine.delivered == {key: len(complete)}
    stage.engine.send(Failed(key, "INTERNAL", "over"))
    sender.all()


@pytest.mark.parametrize("messages", [[{"role": "user"}], "no json"])
def test_a_refused_request_never_reaches_the_engine(stage: Stage, messages: Any) -> None:
    code, message = error_of(stage.ask(None, messages=json.dumps(messages)))
    assert code == "INVALID_ARG"
    assert "messages" in message or "Message" in message
    stage.engine.expect_nothing()


def test_a_turn_without_room_for_a_token_is_given_back(stage: Stage) -> None:
    sender = stage.ask(None, session="s", flags=START, input_ids=[5] * 200)
    begin = stage.engine.expect(BeginTurn)
    stage.engine.send(TurnBegun(begin.key, 0, b"", []))
    assert stage.engine.expect(Abandon).key == begin.key
    code, message = error_of(sender)
    assert code == "INVALID_ARG"
    assert "200 tokens" in message
    assert "at most 199" in message


# ---- cancellation


def test_a_dropped_stream_is_noticed_and_keeps_what_was_sent(stage: Stage) -> None:
    sender = stage.ask(session="s", flags=START, stream=True, stop_words=["two!"])
    key = stage.turn_submitted().key
    sent = stage.generate(key, "one ")
    sender.wait_for(1)
    stage.generate(key, "two")  # held back: not sent
    sender.client_gone = True
    settle = stage.engine.expect(Settle)
    assert (settle.keep, settle.cancelled) == (len(sent), True)
    assert error_of(sender)[0] == "CANCELLED"
    stage.generate(key, "late")  # computed before the engine knew: nobody's


def test_a_dropped_client_that_does_not_stream_has_received_nothing(stage: Stage) -> None:
    sender = stage.ask(session="s", flags=START)
    key = stage.turn_submitted().key
    stage.generate(key, "one ")
    sender.client_gone = True
    assert stage.engine.expect(Settle).keep == 0
    assert error_of(sender)[0] == "CANCELLED"


def test_a_client_gone_before_its_turn_begins_gives_it_back(stage: Stage) -> None:
    sender = stage.ask(session="s", flags=START, stream=True)
    begin = stage.engine.expect(BeginTurn)
    sender.client_gone = True
    while sender.num_polls < 2:
        stage.engine.send(PollCancel(begin.key))
        stage.engine.expect(StillRunning)
    stage.engine.send(TurnBegun(begin.key, 0, b"", []))
    assert stage.engine.expect(Abandon).key == begin.key
    assert error_of(sender)[0] == "CANCELLED"


def test_a_poll_for_a_busy_session_is_answered_at_once(stage: Stage) -> None:
    sender = stage.ask(session="s", flags=START, stream=True)
    key = stage.turn_submitted().key
    stage.engine.send(PollCancel(key))
    assert stage.engine.expect(StillRunning).key == key
    sender.client_gone = True
    stage.engine.send(PollCancel(key))
    assert stage.engine.expect(Settle).cancelled
    assert error_of(sender)[0] == "CANCELLED"


@pytest.mark.parametrize("stream", [True, False])
def test_a_cancel_by_the_administrator_delivers_what_is_complete(stage: Stage, stream: bool) -> None:
    sender = stage.ask(session="s", flags=START, stream=stream, stop_words=["!!"], return_finish_reason=True)
    key = stage.turn_submitted().key
    complete = stage.generate(key, "one!")  # the mark is held back until nothing can follow
    stage.generate(key, ids=[half_a_character(stage)])
    stage.engine.send(CancelRequested(key))
    settle = stage.engine.expect(Settle)
    assert (settle.keep, settle.cancelled) == (len(complete), True)
    stage.engine.send(Settled(key, 99))
    assert "".join(texts(sender)) == "one!"
    assert sender.responses[-1].value("finish_reason") == b"cancelled"


def test_a_cancel_while_the_prompt_is_built_keeps_the_prompt_in_the_history(stage: Stage) -> None:
    sender = stage.ask(session="s", stream=True, return_finish_reason=True, return_session_tokens=True)
    begin = stage.engine.expect(BeginTurn)
    stage.engine.send(TurnBegun(begin.key, 0, b"", []))
    stage.engine.send(CancelRequested(begin.key))
    submit = stage.submitted()
    settle = stage.engine.expect(Settle)
    assert (settle.keep, settle.cancelled) == (0, True)
    stage.engine.send(Settled(begin.key, 99))
    assert texts(sender) == [""]
    assert sender.responses[-1].value("finish_reason") == b"cancelled"
    assert sender.responses[-1].value("session_tokens") == len(unpack_ids(submit.prompt))


# ---- errors


def test_an_error_of_the_engine_ends_the_request_with_its_code(stage: Stage) -> None:
    sender = stage.ask(stream=True)
    key = stage.submitted().key
    stage.generate(key, "some")
    stage.engine.send(Outputs([TokenOutput(key, [], error_code="CANCELLED", error="Too late.")]))
    stage.engine.expect(Settle)
    assert error_of(sender) == ("CANCELLED", "Too late.")
    assert sender.responses[0].text == "some"


def test_a_request_that_cannot_be_read_gets_an_error_without_details(stage: Stage) -> None:
    code, message = error_of(stage.ask(parameters="{"))
    assert "could not be read" in message
    assert code == "INTERNAL"


def test_stopping_ends_every_request(stage: Stage) -> None:
    waiting = [stage.ask(stream=True) for _ in range(6)]
    keys = [stage.submitted().key for _ in waiting]
    stage.generate(keys[0], "some")
    turn = stage.ask(session="s", flags=START)
    stage.engine.expect(BeginTurn)
    stage.front_end._connection._lose("The server is unloading the model.")
    for sender in (*waiting, turn):
        assert error_of(sender) == ("UNAVAILABLE", "The server is unloading the model.")


def messages_so_far(stage: Stage) -> list[Message]:
    """What the engine has received from requests that are over."""
    last = stage.ask("", session="last", flags=END)
    messages = []
    while not isinstance(message := stage.engine.expect(Message), EndSession):
        messages.append(message)
    stage.engine.send(Settled(message.key, 0))
    last.all()
    return messages


ACTIONS = ("text", "stop string", "half", "admin cancel", "poll", "client gone", "error", "end")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(ACTIONS), max_size=12), st.booleans(), st.booleans())
def test_whatever_happens_a_turn_is_answered_and_settled_once(
    stage: Stage, actions: list[str], stream: bool, has_session: bool
) -> None:
    sender = stage.ask(stream=stream, stop_words=["STOP"], **({"session": "s", "flags": START} if has_session else {}))
    key = (stage.turn_submitted() if has_session else stage.submitted()).key
    stage.engine.settles_by_itself = True
    for action in (*actions, "end"):
        match action:
            case "text":
                stage.generate(key, "some ST")
            case "stop string":
                stage.generate(key, "STOP")
            case "half":
                stage.generate(key, ids=[half_a_character(stage)])
            case "admin cancel":
                stage.engine.send(CancelRequested(key))
            case "poll":
                stage.engine.send(PollCancel(key))
            case "client gone":
                sender.client_gone = True
            case "error":
                stage.engine.send(Outputs([TokenOutput(key, [], error_code="INTERNAL", error="Broken.")]))
            case "end":
                stage.generate(key, "end", "length")
    assert sender.all()
    messages = messages_so_far(stage)
    assert {type(message) for message in messages} <= {Settle, StillRunning}
    num_settled = sum(isinstance(message, Settle) for message in messages)
    assert num_settled == 1 if has_session else num_settled <= 1


def test_many_streams_get_all_their_text(stage: Stage) -> None:
    senders = [stage.ask(stream=True) for _ in range(40)]
    keys = [stage.submitted().key for _ in senders]
    for number in range(30):
        piece = stage.tokenizer.encode_segment(f"{number} ")
        stage.engine.send(Outputs([TokenOutput(key, piece, "length" if number == 29 else None) for key in keys]))
    expected = "".join(f"{number} " for number in range(30))
    assert all("".join(texts(sender)) == expected for sender in senders)
