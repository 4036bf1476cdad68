"""What becomes of a tab's sessions once it is closed; the page's times made short."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from limpet.client import AsyncClient
from limpet.webui.chat import Choices
from limpet.webui.server_watch import ServerWatch, Sight
from limpet.webui.tabs import Tab, Tabs
from tests.client.fake_server import fake_server
from tests.client.session_server import SessionServer


@pytest.fixture
def served() -> Iterator[tuple[Tabs, SessionServer]]:
    """Tabs in front of a server that keeps sessions."""
    with fake_server() as server:
        kept = SessionServer()
        server.answer, server.admin = kept.answer, kept.admin
        yield Tabs(server.target), kept


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("limpet.webui.tabs.GRACE_S", 0.05)
    monkeypatch.setattr("limpet.webui.tabs._SILENT_S", 0.2)


def run(work: Coroutine[None, None, None]) -> None:
    """In a thread of its own: the browser of other tests has an event loop in this one."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(asyncio.run, work).result()


async def ask(tabs: Tabs, tab: Tab) -> str:
    """Wait for a whole answer; returns the session's id."""
    tab.current.ask(tabs.client(), Choices(model=""), "hello", keep=tab.library.put)
    await until(lambda: not tab.current.is_running)
    return tab.current.state["id"]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_closed_tabs_session_ends_after_the_grace_time_unless_it_was_only_refreshed(
    served: tuple[Tabs, SessionServer],
) -> None:
    tabs, server = served

    async def scenario() -> None:
        refreshed, closed = tabs.open("before", "mine", None), tabs.open("closed", "theirs", None)
        kept, ended = await ask(tabs, refreshed), await ask(tabs, closed)
        await tabs.close("before")
        await tabs.close("closed")
        tabs.open("after", "mine", refreshed.store()).show(refreshed.current.record.id)
        await until(lambda: ended not in server.sessions)  # its time ran out last
        assert kept in server.sessions

    run(scenario())


def test_a_tab_ends_its_session_of_a_conversation_that_goes_on_in_another_tab(
    served: tuple[Tabs, SessionServer],
) -> None:
    tabs, server = served

    async def scenario() -> None:
        one = tabs.open("one", "mine", None)
        first = await ask(tabs, one)
        other = tabs.open("other", "mine", one.store())
        conversation = one.current.record.id
        other.show(conversation)
        second = await ask(tabs, other)
        assert {first, second} == set(server.sessions)
        assert len(one.show(conversation).turns()) == 2
        await until(lambda: set(server.sessions) == {second})

    run(scenario())


def test_a_server_that_does_not_answer_is_not_waited_for() -> None:
    released = threading.Event()

    async def scenario(target: str) -> None:
        watch = ServerWatch(AsyncClient(target))
        assert await watch.look() == Sight("away")  # without a reason: nothing is known yet
        released.set()
        while (await watch.look()).state != "connected":
            await asyncio.sleep(0.01)

    with fake_server() as server:
        server.admin = lambda operation: {"ready": released.wait(60)}
        run(scenario(server.target))


def test_a_tab_that_vanished_without_a_word_counts_as_closed(served: tuple[Tabs, SessionServer]) -> None:
    tabs, server = served

    def other_tab_speaks() -> bool:
        tabs.hear_from("other")
        return not server.sessions

    async def scenario() -> None:
        await ask(tabs, tabs.open("crashed", "mine", None))
        tabs.open("other", "mine", None)
        await until(other_tab_speaks)

    run(scenario())
