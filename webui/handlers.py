"""What happens on the page's events. Every handler gets the tab from Gradio's request and the browser's storage."""

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
    """The methods return values for the components that page.py names in the same order.

    All are coroutines, so that all run on the event loop, where tabs and answers live.
    """

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
        badge = view.badge(sight, request.session_hash or "")
        return [*_conversation(tab), badge, *Controls.updates(tab.library.choices, sight.models)]

    async def tick(self, request: gr.Request, chosen: str) -> tuple[Any, ...]:
        """Every other second. Outputs: badge, model, list, storage."""
        sight = await self._watch.look()
        tab = self._tabs.hear_from(request.session_hash or "")
        badge = view.badge(sight, request.session_hash or "")
        model = Controls.model_update(chosen, sight.models)
        if tab is None:
            return badge, model, gr.skip(), gr.skip()
        return badge, model, _list(tab), gr.skip() if tab.has_stored() else tab.store()

    async def remember(self, request: gr.Request, stored: Any, *values: Any) -> Any:
        """A control has changed. Output: storage."""
        tab = self._tab(request, stored)
        tab.library.choices = Controls.read(values)
        return tab.store()

    # ---- the list of conversations; outputs: conversation

    async def select(self, request: gr.Request, id: str, stored: Any) -> list[Any]:
        tab = self._tab(request, stored)
        tab.show(id)
        return _conversation(tab)

    async def begin(self, request: gr.Request, stored: Any) -> list[Any]:
        tab = self._tab(request, stored)
        if tab.current.turns():
            tab.show(None)
        return _conversation(tab)

    async def clear(self, request: gr.Request, id: str, stored: Any) -> list[Any]:
        tab = self._tab(request, stored)
        await tab.forget(tab.show(id))
        tab.show(None)
        return _conversation(tab)

    # ---- answers; outputs: conversation

    async def submit(self, request: gr.Request, text: str, id: str, stored: Any, *values: Any) -> list[Any]:
        tab = self._tab(request, stored)
        if not text.strip():
            return [gr.skip()] * 6
        return await self._ask(tab, tab.show(id), text, values)

    async def retry(self, request: gr.Request, event: gr.RetryData, id: str, stored: Any, *values: Any) -> list[Any]:
        tab = self._tab(request, stored)
        chat = tab.show(id)
        await chat.stop()
        turn = _turn(event.index)
        return await self._ask(tab, chat, chat.turns()[turn].question, values, turn)

    async def edit(self, request: gr.Request, event: gr.EditData, id: str, stored: Any, *values: Any) -> list[Any]:
        tab = self._tab(request, stored)
        return await self._ask(tab, tab.show(id), original(str(event.value)), values, _turn(event.index))

    async def stop(self, request: gr.Request, id: str, stored: Any) -> list[Any]:
        tab = self._tab(request, stored)
        await tab.show(id).stop()
        return _conversation(tab)

    async def follow(self, request: gr.Request) -> list[Any]:
        """Ten times a second while an answer comes."""
        tab = self._tabs.hear_from(request.session_hash or "")
        if tab is None:
            return [*[gr.skip()] * 5, gr.Timer(active=False)]
        if tab.current.is_running:
            return [view.messages(tab.current) if tab.is_worth_showing() else gr.skip(), *[gr.skip()] * 5]
        return _conversation(tab)

    async def _ask(
        self, tab: Tab, chat: Chat, question: str, values: tuple[Any, ...], at_turn: int | None = None
    ) -> list[Any]:
        await chat.stop()
        chat.ended = None
        try:
            choices = choices_from(Controls.read(values))
            chat.ask(self._tabs.client(choices.model), choices, question, at_turn, tab.library.put)
        except (LimpetError, ValueError) as error:
            return _conversation(tab, notice=str(error))
        return _conversation(tab, text="" if at_turn is None else None)

    def _tab(self, request: gr.Request, stored: Any) -> Tab:
        return self._tabs.open(request.session_hash or "", stored)


def _conversation(tab: Tab, notice: str = "", text: str | None = None) -> list[Any]:
    """Everything of the conversation shown: messages, text field, notice, list, storage, the timer that follows it.

    `text` None leaves what stands in the text field, unless the server refused a question: that comes back.
    """
    chat = tab.current
    ended, chat.ended = chat.ended, None
    if ended is not None:
        notice = notice or str(ended.error or "")
        text = ended.question if ended.refused and text is None else text
    running = chat.is_running
    field = {**gr.update(submit_btn=not running, stop_btn=running), **({} if text is None else {"value": text})}
    return [view.messages(chat), field, view.notice(notice), _list(tab), tab.store(), gr.Timer(active=running)]


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
