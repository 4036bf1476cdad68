"""The asyncio client: what differs from the blocking one, and that the rest is the same."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator

import pytest

from limpet.client import AsyncClient, Cancelled, ConnectionLost, InvalidRequest, RequestTimeout
from tests.client.fake_server import Asked, FakeServer, Response, data, error, fake_server
from tests.client.session_server import SessionServer


@pytest.fixture
async def aclient(server: FakeServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.target) as client:
        yield client


def one_token_then_silence(asked: Asked) -> Iterator[Response]:
    yield data("x")
    asked.gone.wait(60)


async def gone(asked: Asked) -> bool:
    return await asyncio.to_thread(asked.gone.wait, 30)


async def test_whole_and_streamed_answers(aclient: AsyncClient) -> None:
    assert (await aclient.generate("Hi")).text == "Hello world"
    stream = await aclient.chat([{"role": "user", "content": "Hi"}], stream=True)
    assert [chunk.text async for chunk in stream] == ["Hello ", "world"]
    assert stream.result.finish_reason == "stop"


async def test_many_requests_at_once_on_one_client(server: FakeServer, aclient: AsyncClient) -> None:
    server.answer = lambda asked: iter([data(asked.inputs["text_input"]), data("!", "stop")])
    results = await asyncio.gather(*(aclient.generate(f"q{number}") for number in range(64)))
    assert [result.text for result in results] == [f"q{number}!" for number in range(64)]


async def test_errors_are_of_the_same_family(server: FakeServer, aclient: AsyncClient) -> None:
    server.answer = lambda asked: iter([error("[INVALID_ARG] Bad.")])
    with pytest.raises(InvalidRequest, match=r"^Bad\.$"):
        await aclient.generate("Hi")
    server.answer = lambda asked: iter([data("a")])
    with pytest.raises(ConnectionLost, match="before the answer was complete"):
        await aclient.generate("Hi")


async def test_closing_a_stream_cancels_it_on_the_server(server: FakeServer, aclient: AsyncClient) -> None:
    server.answer = one_token_then_silence
    async with await aclient.generate("Hi", stream=True) as stream:
        await anext(stream)
    assert await gone(server.asked[0])
    assert [chunk async for chunk in stream] == []


async def test_cancelling_the_task_cancels_the_request(server: FakeServer, aclient: AsyncClient) -> None:
    server.answer = one_token_then_silence
    stream = await aclient.generate("Hi", stream=True)
    await anext(stream)
    task = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await gone(server.asked[0])


async def test_a_dropped_stream_is_cancelled(server: FakeServer, aclient: AsyncClient) -> None:
    server.answer = one_token_then_silence
    stream = await aclient.generate("Hi", stream=True)
    await anext(stream)
    del stream
    gc.collect()
    assert await gone(server.asked[0])


async def test_closing_the_client_cancels_what_other_tasks_wait_for(server: FakeServer) -> None:
    server.answer = one_token_then_silence
    client = AsyncClient(server.target)
    streams = [await client.generate("Hi", stream=True) for _ in range(3)]
    for stream in streams:
        await anext(stream)
    waiting = [asyncio.ensure_future(stream.read()) for stream in streams]
    await asyncio.sleep(0)
    await client.close()
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, Cancelled)
    with pytest.raises(Cancelled, match="closed"):
        await client.generate("Hi")


async def test_a_server_that_dies_breaks_the_stream_off(server: FakeServer, aclient: AsyncClient) -> None:
    server.answer = one_token_then_silence
    stream = await aclient.generate("Hi", stream=True)
    await anext(stream)
    await asyncio.to_thread(server.die)
    with pytest.raises(ConnectionLost):
        await anext(stream)
    with fake_server(server.port):
        assert (await aclient.generate("Hi")).text == "Hello world"


async def test_a_server_that_falls_silent_for_good_is_noticed(
    server: FakeServer, aclient: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("limpet.client.aio_call.PROBE_AFTER_S", 0.1)
    monkeypatch.setattr("limpet.client.aio_connection.PROBE_TIMEOUT_S", 0.1)
    server.answer = one_token_then_silence
    server.live.clear()
    with pytest.raises(ConnectionLost, match="stopped answering"):
        await aclient.generate("Hi")
    server.live.set()


async def test_the_timeout_ends_a_request(server: FakeServer) -> None:
    server.answer = one_token_then_silence
    async with AsyncClient(server.target, timeout_s=0.2) as client:
        with pytest.raises(RequestTimeout):
            await client.generate("Hi")


async def test_a_session_keeps_rewinds_and_replays(server: FakeServer, aclient: AsyncClient) -> None:
    kept = SessionServer()
    server.answer, server.admin = kept.answer, kept.admin
    async with aclient.session(system="S") as session:
        for question in "ab":
            await session.ask(question)
        session.rewind()
        stream = await session.ask("c", stream=True)
        assert (await stream.read()).text == "<c>"
        assert kept.sessions[session.id].history == "s:S;u:a;<a>u:c;<c>"
        kept.sessions.clear()
        assert (await session.ask("d")).replayed is True
        await session.cancel()
    assert kept.sessions == {}


async def test_admin_operations(server: FakeServer, aclient: AsyncClient) -> None:
    assert await aclient.ready()
    assert await aclient.status() == {"ready": True}
    server.admin = lambda operation: {"ready": False, "reason": "Starting."}
    assert await aclient.why_not_ready() == "Starting."
