"""The open browser tabs, their conversations, and which tab owns which session."""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from limpet.client import AsyncClient, SessionState
from limpet.client.wire import new_id
from limpet.webui.chat import Chat, end_quietly
from limpet.webui.library import Libraries, Library, Record

GRACE_S = 60.0
"""A closed tab's sessions are kept so long: the page may only have been refreshed."""
_SILENT_S = 180.0  # a tab that says nothing for so long is gone; browsers let hidden ones speak once a minute
_SHOW_EVERY_S = 0.07
_SHOW_EVERY_S_PER_CHARACTER = 2e-5


class Tab:
    """One tab: its conversations by id, and the one that it shows."""

    def __init__(self, owner: "Tabs", library: Library) -> None:
        self._owner = owner
        self.library = library
        self.chats: dict[str, Chat] = {}
        self.current = self.show(None)
        self.listed: object = None  # the list of conversations as the page has it
        self.notice = ""  # the one above the text field
        self.version = 0  # of what was last sent of the conversation shown
        self.heard_at = time.monotonic()
        self._shown_at = 0.0
        self._stored_version = -1

    def show(self, id: str | None) -> Chat:
        """Make a conversation the one shown; None, or one that no longer exists, begins a new one."""
        record = self.library.records.get(id or "")
        chat = self.chats.get(id or "")
        if chat is None and record is None:
            chat = Chat(Record())
        elif record is not None and (chat is None or (record.updated > chat.record.updated and not chat.is_running)):
            self._owner.retire(chat)
            chat = Chat(self._owner.claim(record, self))
        assert chat is not None
        self.chats[chat.record.id] = self.current = chat
        return chat

    def next_version(self) -> int:
        """Number what is sent now."""
        self.version += 1
        return self.version

    def is_worth_showing(self) -> bool:
        """Whether to send the growing answer now: a browser renders all of it, so a long one is sent less often."""
        length = len(self.current.turns()[-1].answer)
        now = time.monotonic()
        if now - self._shown_at < _SHOW_EVERY_S + _SHOW_EVERY_S_PER_CHARACTER * length:
            return False
        self._shown_at = now
        return True

    def has_stored(self) -> bool:
        """Whether the browser has stored the library as it is."""
        return self._stored_version == self.library.version

    def store(self) -> dict[str, Any]:
        """What the browser is to store."""
        self._stored_version = self.library.version
        return self.library.stored()

    async def forget(self, chat: Chat) -> None:
        """Delete a conversation, here and on the server."""
        await chat.stop()
        self.library.delete(chat.record.id)
        self.chats.pop(chat.record.id, None)
        await end_quietly(chat.session)


class Tabs:
    """All tabs by the hash that Gradio gives each."""

    def __init__(self, address: str) -> None:
        self._client = AsyncClient(address)
        self._libraries = Libraries()
        self._tabs: dict[str, Tab] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def client(self, model: str = "") -> AsyncClient:
        """The client of a model; without a name that of whatever the server has. All use one connection.

        So once the badge says "connected" a question gets through.
        """
        return self._client.for_model(model) if model else self._client

    def open(self, hash: str, browser: str, stored: Any) -> Tab:
        """The tab of that hash; a new one is given what its browser has stored."""
        if hash not in self._tabs:
            self._tabs[hash] = Tab(self, self._libraries.open(browser, stored))
        self._tabs[hash].heard_at = time.monotonic()
        return self._tabs[hash]

    def hear_from(self, hash: str) -> Tab | None:
        """The tab of that hash if it is open, with a note that it lives; tabs long silent are closed."""
        now = time.monotonic()
        for other in [name for name, tab in self._tabs.items() if now - tab.heard_at > _SILENT_S]:
            self._in_background(self.close(other))
        tab = self._tabs.get(hash)
        if tab is not None:
            tab.heard_at = now
        return tab

    def claim(self, record: Record, claimant: Tab) -> Record:
        """The record for a tab to use: with a session id of its own if another open tab uses this one."""
        others = (chat for tab in self._tabs.values() if tab is not claimant for chat in tab.chats.values())
        if all(chat.state["id"] != record.state["id"] for chat in others):
            return record.copy()
        state = SessionState(**{**record.state, "id": new_id(), "history_tokens": None, "server_turns": 0})
        return replace(record.copy(), state=state)

    def retire(self, chat: Chat | None) -> None:
        """End the session of a conversation that a newer version, from another tab, has replaced."""
        if chat is not None:
            self._in_background(end_quietly(chat.session))

    async def close(self, hash: str) -> None:
        """The tab is gone: stop its answers now, end its sessions after the grace time unless another tab has them."""
        tab = self._tabs.pop(hash, None)
        if tab is None:
            return
        for chat in tab.chats.values():
            await chat.stop()
        self._in_background(self._end_later(tab))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _end_later(self, tab: Tab) -> None:
        await asyncio.sleep(GRACE_S)
        used = {chat.state["id"] for each in self._tabs.values() for chat in each.chats.values()}
        for chat in tab.chats.values():
            if chat.state["id"] not in used:
                await end_quietly(chat.session)
