"""What happens on the page's events. Every handler gets the tab from Gradio's request and the browser's storage."""

from typing import Any

import gradio as gr

from limpet.client import LimpetError
from limpet.webui import view
from limpet.webui.chat import Chat
from limpet.webui.controls import Controls, choices_from
from limpet.webui.inert_text import original
from limpet.webui.responses import SAME, Conversation, changed_list, conversation
from limpet.webui.server_watch import ServerWatch
from limpet.webui.tabs import Tab, Tabs

_BROWSER_COOKIE = "limpet-browser"  # set by page.js


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
        if newest is not None:
            tab.show(newest.id)
        sight = await self._watch.look()
        badge = view.badge(sight, request.session_hash or "")
        return [*conversation(tab), badge, *Controls.updates(tab.library.choices, sight.models)]

    async def tick(self, request: gr.Request, chosen: str, version: int) -> list[Any]:
        """Every other second. Outputs: badge, model, conversation.

        `version` is that of the conversation as the page has it: responses can overtake each other, and then the last
        one is sent again. What another tab has added to the conversation is shown too.
        """
        sight = await self._watch.look()
        tab = self._tabs.hear_from(request.session_hash or "")
        badge = view.badge(sight, request.session_hash or "")
        model = Controls.model_update(chosen, sight.models)
        if tab is None:
            return [badge, model, *SAME]
        shown = tab.current
        if tab.show(shown.record.id) is not shown or tab.version != version:
            tab.listed = None
            return [badge, model, *conversation(tab, notice=tab.notice)]
        same = Conversation(chats=changed_list(tab), stored=gr.skip() if tab.has_stored() else tab.store())
        return [badge, model, *same]

    async def remember(self, request: gr.Request, stored: Any, *values: Any) -> Any:
        """A control has changed. Output: storage."""
        tab = self._tab(request, stored)
        tab.library.choices = Controls.read(values)
        return tab.store()

    # ---- the list of conversations; outputs: conversation

    async def select(self, request: gr.Request, id: str, stored: Any) -> Conversation:
        tab = self._tab(request, stored)
        tab.show(id)
        return conversation(tab)

    async def begin(self, request: gr.Request, stored: Any) -> Conversation:
        tab = self._tab(request, stored)
        if tab.current.turns():
            tab.show(None)
        return conversation(tab)

    async def clear(self, request: gr.Request, id: str, stored: Any) -> Conversation:
        tab = self._tab(request, stored)
        await tab.forget(tab.show(id))
        tab.show(None)
        return conversation(tab)

    # ---- answers; outputs: conversation

    async def submit(self, request: gr.Request, text: str, id: str, stored: Any, *values: Any) -> Conversation:
        tab = self._tab(request, stored)
        if not text.strip():
            return SAME
        return await self._ask(tab, tab.show(id), text, values)

    async def retry(self, request: gr.Request, event: gr.RetryData, id: str, stored: Any, *values: Any) -> Conversation:
        tab = self._tab(request, stored)
        chat = tab.show(id)
        await chat.stop()
        turn = _turn(event.index)
        return await self._ask(tab, chat, chat.turns()[turn].question, values, turn)

    async def edit(self, request: gr.Request, event: gr.EditData, id: str, stored: Any, *values: Any) -> Conversation:
        tab = self._tab(request, stored)
        question = original(str(event.value))
        if not question.strip():
            return conversation(tab)
        return await self._ask(tab, tab.show(id), question, values, _turn(event.index))

    async def stop(self, request: gr.Request, id: str, stored: Any) -> Conversation:
        tab = self._tab(request, stored)
        await tab.show(id).stop()
        return conversation(tab)

    async def follow(self, request: gr.Request) -> Conversation:
        """Ten times a second while an answer comes."""
        tab = self._tabs.hear_from(request.session_hash or "")
        if tab is None:
            return Conversation(following=gr.Timer(active=False))
        if not tab.current.is_running:
            return conversation(tab)
        if not tab.is_worth_showing():
            return SAME
        return Conversation(messages=view.messages(tab.current), version=tab.next_version())

    async def _ask(
        self, tab: Tab, chat: Chat, question: str, values: tuple[Any, ...], at_turn: int | None = None
    ) -> Conversation:
        await chat.stop()
        chat.ended = None
        try:
            choices = choices_from(Controls.read(values))
            chat.ask(self._tabs.client(choices.model), choices, question, at_turn, tab.library.put)
        except (LimpetError, ValueError) as error:
            return conversation(tab, notice=str(error), text=question if at_turn is None else None)
        return conversation(tab)

    def _tab(self, request: gr.Request, stored: Any) -> Tab:
        return self._tabs.open(request.session_hash or "", request.cookies.get(_BROWSER_COOKIE, ""), stored)


def _turn(index: int | tuple[int, int]) -> int:
    """The turn that a message belongs to."""
    return (index if isinstance(index, int) else index[0]) // 2
