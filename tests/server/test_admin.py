"""limpet_admin through tritonserver, and several front ends on one engine."""

import json
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.aids.chain import script
from tests.aids.live_server import LiveServer, live_server
from tests.aids.wire import post, text_of, wire

pytestmark = pytest.mark.server
ENGINE, STUB = "limpet.backend.engine_process", "triton_python_backend_stub"


def _admin(server: LiveServer, **operation: Any) -> dict[str, Any]:
    status, text = post(server.http, "/v2/models/limpet_admin/generate", {"request": json.dumps(operation)})
    assert status == 200, text
    answer: dict[str, Any] = json.loads(json.loads(text)["response"])
    return answer


def test_status_tells_that_the_engine_is_ready(chain: LiveServer) -> None:
    status = _admin(chain, op="status")
    assert status["ready"] is True
    assert status["models"]["chain"]["pid"] == chain.only(ENGINE).pid


def test_unknown_operation_is_refused_with_the_known_ones(chain: LiveServer) -> None:
    body = {"request": json.dumps({"op": "reboot"})}
    status, text = post(chain.http, "/v2/models/limpet_admin/generate", body)
    assert status == 400
    assert "reboot" in text
    assert "cancel" in text


@pytest.mark.parametrize("by", ["request_id", "session_id"])
def test_cancel_ends_a_running_answer(chain: LiveServer, by: str) -> None:
    name = uuid.uuid4().hex
    session: dict[str, Any] = {"sequence_id": name, "sequence_start": True} if by == "session_id" else {}
    with wire(chain.target, "chain") as client:
        client.send(text_input="loop", max_tokens=30_000, stream=True, request_id=name, **session)
        first = client.next()
        _admin(chain, op="cancel", **{by: name})
        responses = [first, *client.rest()]
    assert responses[-1].final
    assert responses[-1].error is None or "cancel" in responses[-1].error.lower()


def test_cancel_of_an_unknown_request_is_silent(chain: LiveServer) -> None:
    assert "error" not in _admin(chain, op="cancel", request_id=uuid.uuid4().hex)


def test_stop_drains_though_an_admin_key_is_set(edited_chain: Callable[[str, str], Path]) -> None:
    no_key = '"admin_key" value { string_value: "" }'
    with live_server(edited_chain(no_key, no_key.replace('""', '"s3cret"'))) as server:
        server.wait_ready()
        body = {"request": json.dumps({"op": "drain"})}
        status, text = post(server.http, "/v2/models/limpet_admin/generate", body)
        assert (status, "admin_key" in text) == (400, True)
        assert server.stop() == 0
        assert "stopping; 0 running requests" in server.log()


@pytest.fixture(scope="module")
def two_front_ends(edited_chain: Callable[[str, str], Path]) -> Iterator[LiveServer]:
    with live_server(edited_chain("KIND_CPU count: 1", "KIND_CPU count: 2")) as server:
        server.wait_ready()
        yield server
        assert server.stop() == 0


def test_two_front_ends_share_one_engine(two_front_ends: LiveServer) -> None:
    stubs = [" ".join(process.cmdline()) for process in two_front_ends.processes(STUB)]
    assert sum("/chain/" in stub.split()[1] and "limpet_admin" not in stub.split()[1] for stub in stubs) == 2
    assert two_front_ends.only(ENGINE)


def test_session_goes_on_whichever_front_end_takes_the_turn(two_front_ends: LiveServer) -> None:
    keys = ("hello", "emoji", "chinese", "spaces")

    def converse(_number: int) -> list[str]:
        session = uuid.uuid4().hex
        texts = []
        for turn, key in enumerate(keys):
            with wire(two_front_ends.target, "chain") as client:
                turn_of = partial(client.ask, sequence_id=session, sequence_start=turn == 0)
                texts.append(text_of(turn_of(text_input=key, max_tokens=200, stream=True)))
        return texts

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(converse, range(8))) == [[script(key).text for key in keys]] * 8


def test_both_front_ends_answer(two_front_ends: LiveServer) -> None:
    """Triton hands a request to an idle instance; both took part if each spent processor time."""
    stubs = [process for process in two_front_ends.processes(STUB) if "limpet_admin" not in process.cmdline()[1]]
    before = [sum(process.cpu_times()[:2]) for process in stubs]

    def ask(_number: int) -> str:
        with wire(two_front_ends.target, "chain") as client:
            return text_of(client.ask(text_input="emoji", max_tokens=200, stream=True))

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(64))) == {script("emoji").text}
    after = [sum(process.cpu_times()[:2]) for process in stubs]
    assert all(later > earlier for earlier, later in zip(before, after, strict=True))
