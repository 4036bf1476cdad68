"""The open browser tabs, their conversations, and which tab owns which session."""

import asyncio
from dataclasses import replace
from typing import Any

from limpet.client import AsyncClient, SessionState
from limpet.client.wire import new_id
from limpet.webui.chat import Chat, end_quietly
from limpet.webui.library import Libraries, Library, Record

GRACE_S = 60.0
"""A closed tab's sessions are kept so long: the page may only have been refreshed."""


class Tab:
    """One tab: its conversations by id, and the one that it shows."""

    def __init__(self, owner: "Tabs", library: Library) -> None:
        self._owner = owner
        self.library = library
        self.chats: dict[str, Chat] = {}
        self.current = self.show(None)
        self.listed: object = None  # the list of conversations as the page has it

    def show(self, id: str | None) -> Chat:
        """Make a conversation the one shown; None, or one that no longer exists, begins a new one."""
        record = self.library.records.get(id or "")
        chat = self.chats.get(id or "")
        if chat is None and record is None:
            chat = Chat(Record())
        elif record is not None and (chat is None or (record.updated > chat.record.updated and not chat.is_running)):
            chat = Chat(self._owner.claim(record, self))
        assert chat is not None
        self.chats[chat.record.id] = self.current = chat
        return chat

    async def forget(self, chat: Chat) -> None:
        """Delete a conversation, here and on the server."""
        await chat.stop()
        self.library.delete(chat.record.id)
        self.chats.pop(chat.record.id, None)
        await end_quietly(chat.session)


class Tabs:
    """All tabs by the hash that Gradio gives each; the clients of the server's models are shared."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._clients: dict[str, AsyncClient] = {}
        self._libraries = Libraries()
        self._tabs: dict[str, Tab] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def client(self, model: str = "") -> AsyncClient:
        """The client of a model; without a name that of whatever the server has."""
        if model not in self._clients:
            self._clients[model] = AsyncClient(self.address, model=model or None)
        return self._clients[model]

    def open(self, hash: str, stored: Any) -> Tab:
        """The tab of that hash; a new one is given what its browser has stored."""
        if hash not in self._tabs:
            self._tabs[hash] = Tab(self, self._libraries.open(stored))
        return self._tabs[hash]

    def claim(self, record: Record, claimant: Tab) -> Record:
        """The record for a tab to use: with a session id of its own if another open tab uses this one."""
        others = (chat for tab in self._tabs.values() if tab is not claimant for chat in tab.chats.values())
        if all(chat.state["id"] != record.state["id"] for chat in others):
            return record.copy()
        state = SessionState(**{**record.state, "id": new_id(), "history_tokens": None, "server_turns": 0})
        return replace(record.copy(), state=state)

    async def close(self, hash: str) -> None:
        """The tab is gone: stop its answers now, end its sessions after the grace time unless another tab has them."""
        tab = self._tabs.pop(hash, None)
        if tab is None:
            return
        for chat in tab.chats.values():
            await chat.stop()
        task = asyncio.create_task(self._end_later(tab))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _end_later(self, tab: Tab) -> None:
        await asyncio.sleep(GRACE_S)
        used = {chat.state["id"] for each in self._tabs.values() for chat in each.chats.values()}
        for chat in tab.chats.values():
            if chat.state["id"] not in used:
                await end_quietly(chat.session)
