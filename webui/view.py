"""What the conversation shows: messages for Gradio's Chatbot, notices, the list of conversations."""

import html
from typing import Any

from limpet.webui.chat import Chat, ShownTurn
from limpet.webui.inert_text import inert
from limpet.webui.library import title_of
from limpet.webui.server_watch import Sight
from limpet.webui.tabs import Tab

_LABELS = {"connected": "connected", "busy": "busy", "away": "server away"}
_WAITING = '<span class="limpet-waiting" aria-label="waiting for the answer"></span>'


def messages(chat: Chat) -> list[dict[str, Any]]:
    """Two messages a turn, so that message number n belongs to turn n // 2."""
    return [message for turn in chat.turns() for message in _pair(turn, chat.is_running)]


def badge(sight: Sight, tab: str) -> str:
    """The server's only model and its state; page.js reads the tab's name from it."""
    reason = html.escape(sight.reason, quote=True)
    state = f'<span class="limpet-badge {sight.state}" role="status" title="{reason}">{_LABELS[sight.state]}</span>'
    # Of several models the one in use stands in the sidebar, where it is chosen.
    title = html.escape(sight.models[0] if len(sight.models) == 1 else "Limpet")
    name = f'<span class="limpet-name" data-tab="{html.escape(tab, quote=True)}">{title}</span>'
    return f'<div class="limpet-state">{name}{state}</div>'


def notice(text: str) -> str:
    """A line above the text field."""
    return f'<div class="limpet-notice" role="alert">{html.escape(text)}</div>' if text else ""


def titles(tab: Tab) -> list[tuple[str, str]]:
    """The list of conversations, newest first: title and id; also those whose first answer is on its way."""
    records = tab.library.newest_first()
    new = [chat for id, chat in tab.chats.items() if id not in tab.library.records]
    rows = [(_first_question(chat), chat.record.id) for chat in reversed(new) if chat.is_running or chat is tab.current]
    return [(title or "New chat", id) for title, id in [*rows, *((record.title, record.id) for record in records)]]


def _first_question(chat: Chat) -> str:
    return next((title_of(turn.question) for turn in chat.turns()), "")


def _pair(turn: ShownTurn, is_running: bool) -> list[dict[str, Any]]:
    answer = inert(turn.answer) or (_WAITING if is_running and not turn.note else "")
    # Parts of their own, for the answer's Markdown may leave anything open. page.js takes the note out of copied text.
    note = f'<small class="limpet-note">{html.escape(turn.note)}</small>'
    parts = [{"type": "text", "text": text} for text in ([answer, note] if turn.note else [answer])]
    return [{"role": "user", "content": inert(turn.question)}, {"role": "assistant", "content": parts}]
