"""Models that several processes share, through tritonserver: a Llama on two ranks, a DeepSeek-V2 on four."""

import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import PreTrainedModel

from limpet.backend.config import EngineConfig
from limpet.converter.convert import convert
from limpet.converter.plan import Options, make_plan
from tests.aids.deepseek import write_deepseek
from tests.aids.live_server import LiveServer, kill, shared_server
from tests.aids.tiny import write_tiny
from tests.aids.transformers_reference import greedy_ids
from tests.aids.wire import Wire, ids_of, text_of, wire

pytestmark = pytest.mark.server
RANK = "limpet.backend.ranks.rank_process"
BLOCK_BYTES = {"llama": 2 * 2 * 8 * 16 * 4, "deepseek": 4 * 40 * 16 * 4}  # of a rank, 16 tokens
DEGREES = {"llama": 2, "deepseek": 4}
FIRST, SECOND = list(range(10, 30)), [40, 41, 42]
BROKEN_OFF_S = 5 * 5.0  # a running request gets its error within 5 s of a rank's death: five times that
NEXT_ANSWER_S = 5 * 15.0


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


@pytest.fixture(scope="module")
def references(sources: Path) -> dict[str, PreTrainedModel]:
    return {"llama": write_tiny(sources / "llama"), "deepseek": write_deepseek(sources / "deepseek", "v2")}


@pytest.fixture(scope="module")
def repository(sources: Path, references: dict[str, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches of 16 blocks."""
    workspace = tmp_path_factory.mktemp("shared")
    for name in references:
        engine = EngineConfig(
            tp=DEGREES[name],
            device="cpu",
            max_batch_size=8,
            cache_block_seq_len=16,
            cache_bytes=16 * BLOCK_BYTES[name],
            max_prefill_token_num=32,
        )
        options = Options(source=sources / name, workspace=workspace, name=name, engine=engine)
        convert(make_plan(options), lambda num_bytes: None)
    return workspace / "model_repository"


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[LiveServer]:
    yield from shared_server(repository)


def _send(client: Wire, ids: list[int], max_tokens: int, **options: Any) -> None:
    client.send(
        input_ids=ids,
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        stream=True,
        return_output_ids=True,
        return_num_cached_tokens=True,
        **options,
    )


def _turn(client: Wire, session: str, ids: list[int], **options: Any) -> tuple[list[int], int]:
    """The answer of 12 ids, and how many tokens were cached."""
    _send(client, ids, 12, sequence_id=session, **options)
    responses = list(client.rest())
    return ids_of(responses), responses[-1].outputs["num_cached_tokens"][0]


@pytest.mark.parametrize("model", DEGREES)
def test_turns_append_and_an_ended_session_leaves_nothing_on_any_rank(
    server: LiveServer, references: dict[str, PreTrainedModel], model: str
) -> None:
    session, history = uuid.uuid4().hex, list[int]()
    with wire(server.target, model) as client:
        for ids in (FIRST, SECOND):
            answer, num_cached = _turn(client, session, ids, sequence_start=not history)
            assert answer == greedy_ids(references[model], history + ids, 12)
            assert num_cached == max(0, len(history) - 1)
            history += ids + answer
        client.ask(text_input="", sequence_id=session, sequence_end=True)
        answer, _ = _turn(client, session, SECOND, sequence_start=True, sequence_end=True)
        assert answer == greedy_ids(references[model], SECOND, 12)


@pytest.mark.parametrize("model", DEGREES)
def test_answers_that_the_cache_cannot_hold_together_and_one_cancelled_among_them(
    server: LiveServer, references: dict[str, PreTrainedModel], model: str
) -> None:
    prompts = [[(7 * row + 3 * column) % 290 + 4 for column in range(30)] for row in range(6)]
    with ExitStack() as stack:
        clients = [stack.enter_context(wire(server.target, model)) for _ in prompts]
        with wire(server.target, model) as dropped:
            _send(dropped, FIRST, 150)
            for client, prompt in zip(clients, prompts, strict=True):
                _send(client, prompt, 30)
            dropped.next()
        answers = [ids_of(list(client.rest())) for client in clients]
    assert answers == [greedy_ids(references[model], prompt, 30) for prompt in prompts]


@pytest.mark.parametrize("model", DEGREES)
def test_a_stop_string_ends_the_answer(server: LiveServer, model: str) -> None:
    with wire(server.target, model) as client:
        _send(client, FIRST, 60)
        whole = text_of(list(client.rest()))
        stop = next(part for place in range(5, len(whole)) if (part := whole[place : place + 2]).isascii())
        _send(client, FIRST, 60, stop_words=[stop])
        assert text_of(list(client.rest())) == whole[: whole.index(stop)]


def _lose_a_rank(server: LiveServer) -> None:
    """Kill one of the Llama's; what ran fails, and the next answers come from new processes."""
    with ExitStack() as stack:
        clients = [stack.enter_context(wire(server.target, "llama")) for _ in range(4)]
        for client in clients:
            _send(client, FIRST, 230)
        first = clients[0].next()
        assert first.error is None
        ranks = [each for each in server.processes(RANK) if len(_siblings(each, server)) == DEGREES["llama"] - 1]
        kill(ranks)
        for client in clients:
            assert list(client.rest(BROKEN_OFF_S))[-1].error is not None


def _answer_when_back(server: LiveServer) -> list[int]:
    """Ask until the Llama answers; while its ranks start each request is refused at once."""
    deadline = time.monotonic() + NEXT_ANSWER_S
    while True:
        with wire(server.target, "llama") as client:
            _send(client, FIRST, 12)
            responses = list(client.rest())
        if responses[-1].error is None:
            return ids_of(responses)
        assert "UNAVAILABLE" in responses[-1].error
        assert time.monotonic() < deadline, responses[-1].error


def _siblings(process: psutil.Process, server: LiveServer) -> list[psutil.Process]:
    return [each for each in server.processes(RANK) if each.ppid() == process.ppid()]


def test_a_killed_rank_fails_what_runs_and_all_ranks_are_new(
    server: LiveServer, references: dict[str, PreTrainedModel]
) -> None:
    before = {process.pid for process in server.processes(RANK)}
    _lose_a_rank(server)
    assert _answer_when_back(server) == greedy_ids(references["llama"], FIRST, 12)
    ranks = {process.pid for process in server.processes(RANK)}
    assert len(ranks) == 1 + 3
    assert len(ranks & before) == 3, "the DeepSeek-V2's ranks live on"


@pytest.mark.long
def test_ten_ranks_killed_one_after_the_other(server: LiveServer, references: dict[str, PreTrainedModel]) -> None:
    expected = greedy_ids(references["llama"], FIRST, 12)
    for _ in range(10):
        _lose_a_rank(server)
        assert _answer_when_back(server) == expected
