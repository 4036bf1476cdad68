"""Sessions through tritonserver when clients leave at any point and memory is short.

The random model's next token depends on the whole history, and transformers recomputes it: an id too many or too few in
a session, or a neighbour's keys and values, changes the answer.
"""

import json
import random
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from transformers import PreTrainedModel

from tests.aids.live_server import LiveServer
from tests.aids.repositories import TINY_BLOCK_BYTES, TINY_ENGINE
from tests.aids.tiny import build_tiny
from tests.aids.transformers_reference import greedy_ids
from tests.aids.wire import Response, Wire, await_engine, engine_status, ids_of, post, wire

pytestmark = pytest.mark.server
BLOCK = 16
FIRST, SECOND = list(range(10, 30)), [40, 41, 42]


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return build_tiny()


def _ask(client: Wire, session: str, ids: list[int], max_tokens: int, **options: Any) -> None:
    client.send(
        options.pop("parameters", None),
        input_ids=ids,
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        stream=True,
        return_output_ids=True,
        return_session_tokens=True,
        return_num_cached_tokens=True,
        sequence_id=session,
        **options,
    )


def _turn(client: Wire, session: str, ids: list[int], max_tokens: int, **options: Any) -> list[Response]:
    _ask(client, session, ids, max_tokens, **options)
    return list(client.rest())


def _cancel(server: LiveServer, session: str) -> None:
    cancel = json.dumps({"op": "cancel", "session_id": session})
    assert post(server.http, "/v2/models/limpet_admin/generate", {"request": cancel})[0] == 200


@pytest.mark.parametrize("kept", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_turn_after_a_dropped_stream_continues_from_what_the_client_received(
    tiny: LiveServer, reference: PreTrainedModel, kept: int
) -> None:
    session = uuid.uuid4().hex
    received: list[int] = []
    with wire(tiny.target, "tiny") as dropped:
        _ask(dropped, session, FIRST, 400, sequence_start=True)
        while not received or len(received) < kept:
            received += ids_of([dropped.next()])
    history = FIRST + received[:kept]
    with wire(tiny.target, "tiny") as client:
        answer = _turn(client, session, SECOND, 8, parameters={"session_tokens": len(history)}, sequence_end=True)
    assert ids_of(answer) == greedy_ids(reference, history + SECOND, 8)
    assert answer[-1].outputs["session_tokens"] == [len(history) + len(SECOND) + 8]


def test_turn_after_a_dropped_stream_keeps_what_was_delivered(tiny: LiveServer, reference: PreTrainedModel) -> None:
    """Without session_tokens the server's own watermark counts: at least what the client saw, and all of it right."""
    session = uuid.uuid4().hex
    with wire(tiny.target, "tiny") as dropped:
        _ask(dropped, session, FIRST, 400, sequence_start=True)
        seen = ids_of([dropped.next(), dropped.next()])
    with wire(tiny.target, "tiny") as client:
        answer = _turn(client, session, SECOND, 8, sequence_end=True)
    length = answer[-1].outputs["session_tokens"][0] - 8 - len(SECOND)
    assert length >= len(FIRST) + len(seen)
    history = FIRST + greedy_ids(reference, FIRST, length - len(FIRST))
    assert ids_of(answer) == greedy_ids(reference, history + SECOND, 8)


def test_watermark_of_the_server_is_exact_around_the_edge_of_a_block(
    tiny: LiveServer, reference: PreTrainedModel
) -> None:
    """Without session_tokens: cancelled until a history has ended just before, at and just behind an edge."""
    edges = {BLOCK - 1, 0, 1}
    num_late = 2  # tokens that come after the cancel was sent, by the last attempt
    for _ in range(200):
        session = uuid.uuid4().hex
        prompt = list(range(10, 10 + BLOCK + (min(edges) - 1 - num_late) % BLOCK))
        with wire(tiny.target, "tiny") as client:
            _ask(client, session, prompt, 400, sequence_start=True)
            first = client.next()
            _cancel(tiny, session)
            history = prompt + ids_of([first, *client.rest()])
            answer = _turn(client, session, SECOND, 4, sequence_end=True)
        assert answer[-1].outputs["session_tokens"] == [len(history) + len(SECOND) + 4]
        assert ids_of(answer) == greedy_ids(reference, history + SECOND, 4)
        num_late = len(history) - len(prompt) - 1
        edges.discard(len(history) % BLOCK)
        if not edges:
            return
    raise AssertionError(f"no turn ended with a history of 16 n + {edges} tokens")


def test_turn_after_a_cancel_during_prefill_continues_after_the_prompt(
    tiny: LiveServer, reference: PreTrainedModel
) -> None:
    for attempt in range(100):
        session = uuid.uuid4().hex
        prompt = [attempt + 4, *((7 * position) % 290 + 4 for position in range(399))]
        with wire(tiny.target, "tiny") as client:
            _ask(client, session, prompt, 50, sequence_start=True, return_finish_reason=True)
            time.sleep(0.002 * (attempt % 10))  # the point at which it is cut, no wait for anything
            _cancel(tiny, session)
            cut = list(client.rest())
            answer = _turn(client, session, SECOND, 8, sequence_end=True)
        history = prompt + ids_of(cut)
        assert ids_of(answer) == greedy_ids(reference, history + SECOND, 8)
        if history == prompt and 0 < answer[-1].outputs["num_cached_tokens"][0] < len(prompt) - 1:
            assert cut[-1].outputs["finish_reason"] == [b"cancelled"]
            return
    raise AssertionError("no turn was cut while its prompt was computed")


def test_cancel_by_op_ends_with_the_reason_and_an_exact_history(tiny: LiveServer, reference: PreTrainedModel) -> None:
    session = uuid.uuid4().hex
    with wire(tiny.target, "tiny") as client:
        _ask(client, session, FIRST, 450, sequence_start=True, return_finish_reason=True)
        responses = [client.next()]
        _cancel(tiny, session)
        responses += client.rest()
        assert responses[-1].outputs["finish_reason"] == [b"cancelled"]
        history = FIRST + ids_of(responses)
        assert responses[-1].outputs["session_tokens"] == [len(history)]
        answer = _turn(client, session, SECOND, 8, sequence_end=True)
    assert ids_of(answer) == greedy_ids(reference, history + SECOND, 8)


def test_stop_then_ask_at_once_is_never_busy(tiny: LiveServer) -> None:
    session = uuid.uuid4().hex
    start = True
    for _ in range(100):
        with wire(tiny.target, "tiny") as dropped:
            _ask(dropped, session, FIRST, 300, sequence_start=start)
            dropped.next()
            start = False
        with wire(tiny.target, "tiny") as client:
            answer = _turn(client, session, SECOND, 2, parameters={"session_rewind": 1})
            assert len(ids_of(answer)) == 2
            _turn(client, session, SECOND, 1, sequence_start=True)


def test_interleaved_sessions_keep_their_secrets_while_the_pool_holds_few(
    tiny: LiveServer, reference: PreTrainedModel
) -> None:
    """Half of the sessions take 4 blocks at any time and half 5: the pool holds 8 of the 20."""
    lengths = [44, 60] * 10  # three turns add 20 tokens, of which the last has no place in the cache
    assert TINY_ENGINE.cache_bytes == 8 * (4 + 5) // 2 * TINY_BLOCK_BYTES
    secrets = {
        uuid.uuid4().hex: [(31 * number + 5 * place) % 290 + 4 for place in range(length)]
        for number, length in enumerate(lengths)
    }
    histories: dict[str, list[int]] = {}
    evicted = engine_status(tiny.http, "tiny")["blocks_evicted"]

    def turn(session: str, ids: list[int], **options: Any) -> None:
        with wire(tiny.target, "tiny") as client:
            answer = ids_of(_turn(client, session, ids, 6, **options))
        history = histories.get(session, []) + ids
        assert answer == greedy_ids(reference, history, 6)
        histories[session] = history + answer

    for session, secret in secrets.items():
        turn(session, secret, sequence_start=True)
    for number in range(2):
        for session in random.Random(number).sample(sorted(secrets), len(secrets)):
            turn(session, [200 + number], sequence_end=number == 1)
    assert engine_status(tiny.http, "tiny")["blocks_evicted"] > evicted, "the pool was too large for this test"


def test_four_hundred_dropped_streams_leave_nothing_behind(tiny: LiveServer, reference: PreTrainedModel) -> None:
    def drop(number: int) -> None:
        chance = random.Random(number)
        with wire(tiny.target, "tiny") as client:
            _ask(client, uuid.uuid4().hex, FIRST, 24, sequence_start=True, sequence_end=True)
            for _ in range(chance.randrange(25)):
                if client.next().final:
                    break

    def resources() -> dict[str, tuple[int, int]]:
        kinds = ("engine_process", "triton_python_backend_stub")
        found = {process.pid: process for kind in kinds for process in tiny.processes(kind)}
        return {str(pid): (process.num_threads(), process.num_fds()) for pid, process in found.items()}

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(drop, range(16)))  # threads that are started on first use
        before_status, before = await_engine(tiny.http, "tiny", requests=0), resources()
        list(pool.map(drop, range(400)))
    after_status, after = await_engine(tiny.http, "tiny", requests=0), resources()
    assert after_status["running"] == after_status["waiting"] == 0
    assert after_status["sessions"] == before_status["sessions"]
    assert after_status["blocks_free"] == before_status["blocks_free"]
    for pid, (threads, descriptors) in before.items():
        assert after[pid][0] <= threads + 1, "threads are left"
        assert after[pid][1] <= descriptors + 2, "descriptors are left"
    with wire(tiny.target, "tiny") as client:
        answer = _turn(client, uuid.uuid4().hex, FIRST, 8, sequence_start=True, sequence_end=True)
    assert ids_of(answer) == greedy_ids(reference, FIRST, 8)
    assert psutil.pid_exists(int(next(iter(before))))
