"""The engine as a process behind its link: requests, sessions against transformers, lost front ends, its own end."""

from collections.abc import Iterator
from typing import Any

import pytest

from limpet.backend.link.ownership import EXIT_NOT_OWNER
from limpet.backend.sampling_params import SamplingParams
from tests.aids.engine_process import EngineUnderTest, engine_process
from tests.aids.fake_front_end import FakeFrontEnd, Refused, history_ids
from tests.aids.ids_equal import assert_ids_equal
from tests.aids.tiny_models import ConvertedTiny, convert_tiny
from tests.aids.transformers_reference import greedy_reference, session_references

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)
PARAMETERS = {"max_batch_size": "8", "cache_bytes": str(4 << 20), "cache_block_seq_len": "16", "device": "cpu"}
TURNS = [[5, 17, 123, 44], [200], list(range(100, 140))]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ConvertedTiny:
    return convert_tiny(tmp_path_factory.mktemp("process"), "grouped-query")


@pytest.fixture(scope="module")
def running(tiny: ConvertedTiny) -> Iterator[EngineUnderTest]:
    with engine_process(tiny.model_dir, PARAMETERS) as running, running.connect():  # without any, it would leave
        yield running


@pytest.fixture
def front_end(running: EngineUnderTest) -> Iterator[FakeFrontEnd]:
    with running.connect() as front_end:
        yield front_end


def test_the_welcome_says_what_a_front_end_needs(running: EngineUnderTest, front_end: FakeFrontEnd) -> None:
    assert front_end.info.engine_pid == running.process.pid
    assert front_end.info.max_batch_size == 8
    assert front_end.info.session_len == 512
    assert front_end.info.vocab_size == 300
    assert front_end.info.eos_token_ids == [1]


def test_a_request_is_answered_token_by_token(front_end: FakeFrontEnd, tiny: ConvertedTiny) -> None:
    answer = front_end.generate(TURNS[0], GREEDY)
    assert_ids_equal(
        answer.ids,
        greedy_reference(tiny.reference, TURNS[0], NUM_TOKENS),
        prompt=TURNS[0],
        generate=lambda prompt, num_tokens: front_end.generate(prompt, GREEDY).ids[:num_tokens],
        name="request",
    )
    assert answer.finish_reason == "length"
    assert answer.num_outputs == NUM_TOKENS


def test_turns_of_a_session_equal_the_whole_conversation_recomputed(
    front_end: FakeFrontEnd, tiny: ConvertedTiny
) -> None:
    history: list[int] = []
    for place, reference in enumerate(session_references(tiny.reference, TURNS, NUM_TOKENS)):
        answer = front_end.ask("parity", TURNS[place], GREEDY, start=place == 0)
        assert_ids_equal(
            answer.ids,
            reference,
            prompt=history + TURNS[place],
            generate=lambda prompt, num_tokens: front_end.generate(prompt, GREEDY).ids[:num_tokens],
            name=f"turn {place + 1}",
        )
        assert answer.num_cached_tokens == max(0, len(history) - 1)
        history += TURNS[place] + answer.ids
    assert history_ids(front_end.begin_turn("parity")) == history


def test_settling_early_leaves_what_was_delivered(front_end: FakeFrontEnd, tiny: ConvertedTiny) -> None:
    turn = front_end.begin_turn("early", start=True)
    front_end.submit(TURNS[0], ENDLESS, key=turn.key)
    received = front_end.collect(turn.key, at_least=10).ids
    assert front_end.settle(turn.key, 7, cancelled=True) == len(TURNS[0]) + 7
    turn = front_end.begin_turn("early")
    assert history_ids(turn) == TURNS[0] + received[:7]
    front_end.abandon(turn)
    answer = front_end.ask("early", TURNS[1], GREEDY)
    assert answer.num_cached_tokens == len(TURNS[0]) + 7 - 1
    prompt = TURNS[0] + received[:7] + TURNS[1]
    assert answer.ids == greedy_reference(tiny.reference, prompt, NUM_TOKENS).ids


def test_a_second_turn_is_refused_while_one_runs_and_leaves_it_alone(
    running: EngineUnderTest, front_end: FakeFrontEnd
) -> None:
    turn = front_end.begin_turn("busy", start=True)
    front_end.submit(TURNS[0], ENDLESS, key=turn.key)
    front_end.collect(turn.key, at_least=1)
    with running.connect() as other, pytest.raises(Refused, match="UNAVAILABLE: Session busy"):
        other.begin_turn("busy", start=True)
    with running.connect() as other, pytest.raises(Refused, match="UNAVAILABLE: Session busy"):
        other.admin("sessions", action="fork", session_id="busy")
    assert len(front_end.collect(turn.key, at_least=20).ids) >= 20
    front_end.settle(turn.key, 1)


def test_a_turn_whose_client_has_gone_makes_way(running: EngineUnderTest, front_end: FakeFrontEnd) -> None:
    turn = front_end.begin_turn("gone", start=True)
    front_end.submit(TURNS[0], ENDLESS, key=turn.key)
    received = front_end.collect(turn.key, at_least=5).ids
    front_end.gone_clients[turn.key] = 3
    with running.connect() as other:
        forked = other.admin("sessions", action="fork", session_id="gone", new_session_id="gone's fork")["session"]
        assert forked["tokens"] == len(TURNS[0]) + 3
        assert history_ids(other.begin_turn("gone")) == TURNS[0] + received[:3]


def test_a_front_end_that_falls_silent_loses_its_requests_but_not_what_was_delivered(running: EngineUnderTest) -> None:
    silent = running.connect()
    turn = silent.begin_turn("silent", start=True)
    silent.submit(TURNS[0], ENDLESS, key=turn.key)
    received = silent.collect(turn.key, at_least=6).ids
    silent.deliver(turn.key, 4)
    silent.fall_silent()
    with running.connect() as other:
        assert history_ids(other.begin_turn("silent")) == TURNS[0] + received[:4]
    silent.drop()


def test_forks_go_on_from_the_same_past_and_all_keep_their_cache(front_end: FakeFrontEnd, tiny: ConvertedTiny) -> None:
    history = TURNS[0] + front_end.ask("origin", TURNS[0], GREEDY, start=True).ids
    forked = front_end.admin("sessions", action="fork", session_id="origin", new_session_id="branch")["session"]
    assert (forked["session_id"], forked["tokens"], forked["turns"]) == ("branch", len(history), 1)
    second = front_end.admin("sessions", action="fork", session_id="branch")["session"]["session_id"]
    for session, new in (("origin", TURNS[1]), ("branch", TURNS[2]), (second, TURNS[1])):
        answer = front_end.ask(session, new, GREEDY)
        assert answer.num_cached_tokens == len(history) - 1
        assert answer.ids == greedy_reference(tiny.reference, history + new, NUM_TOKENS).ids
    front_end.end_session("origin")
    assert front_end.ask("branch", TURNS[0], GREEDY).num_cached_tokens > len(history)


def test_sessions_are_listed_with_their_blocks(front_end: FakeFrontEnd) -> None:
    answer = front_end.ask("listed", TURNS[2], GREEDY, start=True)
    num_tokens = len(TURNS[2]) + len(answer.ids)
    shown = front_end.admin("sessions", action="show", session_id="listed")["session"]
    assert (shown["tokens"], shown["turns"], shown["running"]) == (num_tokens, 1, False)
    assert shown["blocks"] == {"device": -(-(num_tokens - 1) // 16), "host": 0, "none": 0}
    listed = front_end.admin("sessions", limit=1)
    assert listed["sessions"][0]["session_id"] == "listed"
    assert listed["total"] >= 1
    assert len(front_end.admin("sessions", limit=10**30)["sessions"]) == listed["total"]
    assert front_end.admin("sessions", action="end", session_id="listed") == {"ended": True}
    assert front_end.admin("sessions", action="end", session_id="listed") == {"ended": False}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"action": "rename"}, "INVALID_ARG"),
        ({"action": ["list"]}, "INVALID_ARG"),
        ({"limit": 0}, "INVALID_ARG"),
        ({"action": "fork", "session_id": "never begun", "new_session_id": "cut\0here"}, "INVALID_ARG"),
        ({"action": "show", "session_id": "half of a pair: \ud800"}, "INVALID_ARG"),
        ({"action": "show", "session_id": "never begun"}, "NOT_FOUND"),
        ({"action": "fork", "session_id": "never begun"}, "NOT_FOUND"),
    ],
)
def test_wrong_operations_on_sessions_are_refused(
    front_end: FakeFrontEnd, arguments: dict[str, Any], code: str
) -> None:
    with pytest.raises(Refused, match=code):
        front_end.admin("sessions", **arguments)


def test_unknown_sessions_and_impossible_prompts_are_refused(front_end: FakeFrontEnd) -> None:
    with pytest.raises(Refused, match="NOT_FOUND"):
        front_end.begin_turn("never begun")
    with pytest.raises(Refused, match=r"INVALID_ARG: .*512"):
        front_end.generate([5] * 512, GREEDY)
    with pytest.raises(Refused, match=r"INVALID_ARG: .*vocabulary"):
        front_end.generate([300], GREEDY)
    assert len(front_end.generate(TURNS[0], GREEDY).ids) == NUM_TOKENS


def test_the_engine_leaves_with_its_server(tiny: ConvertedTiny) -> None:
    with engine_process(tiny.model_dir, PARAMETERS) as running:
        front_end = running.connect()
        front_end.submit(TURNS[0], ENDLESS)
        running.server.kill()
        front_end.drop()
        assert running.wait_end() == 0
        assert not running.runtime.folder.exists()


@pytest.mark.long
def test_the_engine_leaves_some_time_after_its_last_front_end(tiny: ConvertedTiny) -> None:
    with engine_process(tiny.model_dir, PARAMETERS) as running:
        running.connect().close()
        assert running.wait_end() == 0
        assert not running.runtime.folder.exists()


def test_only_one_engine_runs_for_a_model(tiny: ConvertedTiny, running: EngineUnderTest) -> None:
    second = running.runtime.spawn(tiny.model_dir, running.server.pid, PARAMETERS)
    assert second.wait(60) == EXIT_NOT_OWNER
    assert running.process.poll() is None


@pytest.mark.parametrize(
    "parameters",
    [{"cache_block_seq_len": "17"}, {"cache_bytes": "100"}, {"no_such": "1"}, {"session_store": "/no/such/folder/db"}],
)
def test_a_wrong_setting_ends_the_engine_and_names_itself(
    tiny: ConvertedTiny, parameters: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    with engine_process(tiny.model_dir, {"device": "cpu", **parameters}) as running:
        assert running.wait_end() == 1
    assert next(iter(parameters)) in capfd.readouterr().err
