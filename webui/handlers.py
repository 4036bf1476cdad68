"""What happens on the page's events. Every handler gets the tab from Gradio's request and the browser's storage."""

from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from limpet.client import LimpetError
from limpet.webui import view
from limpet.webui.chat import Chat
from limpet.webui.controls import Controls, choices_from
from limpet.webui.inert_text import original
from limpet.webui.server_watch import ServerWatch
from limpet.webui.tabs import Tab, Tabs


class Handlers:
    """The methods return values for the components that page.py names in the same order."""

    def __init__(self, tabs: Tabs, watch: ServerWatch) -> None:
        self._tabs = tabs
        self._watch = watch

    # ---- the tab's life

    async def load(self, request: gr.Request, stored: Any) -> list[Any]:
        """Outputs: conversation, badge, the controls."""
        tab = self._tab(request, stored)
        newest = next(iter(tab.library.newest_first()), None)
        if newest is not None and not tab.current.turns():  # else a question was faster than the page
            tab.show(newest.id)
        sight = await self._watch.look()
        return [*_conversation(tab), sight.badge(), *Controls.updates(tab.library.choices, sight.models)]

    async def tick(self, request: gr.Request, chosen: str, stored: Any) -> tuple[Any, ...]:
        """Every other second. Outputs: badge, model, list."""
        sight = await self._watch.look()
        tab = self._tab(request, stored)
        return sight.badge(), Controls.model_update(chosen, sight.models), _list(tab)

    async def unload(self, request: gr.Request) -> None:
        """The tab was closed, or its page is loaded anew."""
        await self._tabs.close(request.session_hash or "")

    def remember(self, request: gr.Request, stored: Any, *values: Any) -> Any:
        """A control has changed. Output: storage."""
        tab = self._tab(request, stored)
        tab.library.choices = Controls.read(values)
        return tab.library.stored()

    # ---- the list of conversations; outputs: conversation

    def select(self, request: gr.Request, id: str, stored: Any) -> list[Any]:
        tab = self._tab(request, stored)
        tab.show(id)
        return _conversation(tab)

    def begin(self, request: gr.Request, stored: Any) -> list[Any]:
        tab = self._tab(request, stored)
        if tab.current.turns():
            tab.show(None)
        return _conversation(tab)

    async def clear(self, request: gr.Request, id: str, stored: Any) -> list[Any]:
        tab = self._tab(request, stored)
        await tab.forget(tab.show(id))
        tab.show(None)
        return _conversation(tab)

    # ---- answers; outputs: conversation, again and again while the answer comes

    async def submit(
        self, request: gr.Request, text: str, id: str, stored: Any, *values: Any
    ) -> AsyncIterator[list[Any]]:
        if not text.strip():
            yield [gr.skip()] * 5
            return
        tab = self._tab(request, stored)
        async for update in self._answer(tab, tab.show(id), text, values):
            yield update

    async def retry(
        self, request: gr.Request, event: gr.RetryData, id: str, stored: Any, *values: Any
    ) -> AsyncIterator[list[Any]]:
        tab = self._tab(request, stored)
        chat = tab.show(id)
        await chat.stop()
        turn = _turn(event.index)
        async for update in self._answer(tab, chat, chat.turns()[turn].question, values, turn):
            yield update

    async def edit(
        self, request: gr.Request, event: gr.EditData, id: str, stored: Any, *values: Any
    ) -> AsyncIterator[list[Any]]:
        tab = self._tab(request, stored)
        async for update in self._answer(tab, tab.show(id), original(str(event.value)), values, _turn(event.index)):
            yield update

    async def stop(self, request: gr.Request, id: str, stored: Any) -> None:
        await self._tab(request, stored).show(id).stop()

    async def _answer(
        self, tab: Tab, chat: Chat, question: str, values: tuple[Any, ...], at_turn: int | None = None
    ) -> AsyncIterator[list[Any]]:
        try:
            await chat.stop()
            choices = choices_from(Controls.read(values))
            answer = chat.ask(self._tabs.client(choices.model), choices, question, at_turn, tab.library.put)
        except (LimpetError, ValueError) as error:
            yield _conversation(tab, notice=str(error), text=question)
            return
        yield _conversation(tab, text="" if at_turn is None else None)
        async for _ in answer.changes():
            if tab.current is chat:
                yield [view.messages(chat), *[gr.skip()] * 4]
        if tab.current is chat:
            yield _conversation(tab, notice=str(answer.error or ""), text=question if answer.refused else None)
        else:
            yield [gr.skip(), gr.skip(), gr.skip(), _list(tab), tab.library.stored()]

    def _tab(self, request: gr.Request, stored: Any) -> Tab:
        return self._tabs.open(request.session_hash or "", stored)


def _conversation(tab: Tab, notice: str = "", text: str | None = None) -> list[Any]:
    """Everything of the conversation shown: messages, text field, notice, list, storage.

    `text` None leaves what stands in the text field.
    """
    running = tab.current.is_running
    field = {**gr.update(submit_btn=not running, stop_btn=running), **({} if text is None else {"value": text})}
    return [view.messages(tab.current), field, view.notice(notice), _list(tab), tab.library.stored()]


def _list(tab: Tab) -> Any:
    """The list of conversations; nothing if the page has it already."""
    rows = view.titles(tab.library, tab.current)
    listed = (rows, tab.current.record.id)
    if tab.listed == listed:
        return gr.skip()
    tab.listed = listed
    return gr.update(choices=rows, value=tab.current.record.id)


def _turn(index: int | tuple[int, int]) -> int:
    """The turn that a message belongs to."""
    return (index if isinstance(index, int) else index[0]) // 2
