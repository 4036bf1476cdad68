"""What the conversation shows: messages for Gradio's Chatbot, notices, the list of conversations."""

import html
from typing import Any

from limpet.webui.chat import Chat, ShownTurn
from limpet.webui.inert_text import inert, open_fence
from limpet.webui.library import Library
from limpet.webui.server_watch import Sight

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


def titles(library: Library, current: Chat) -> list[tuple[str, str]]:
    """The list of conversations, newest first: title and id."""
    rows = [(record.title or "New chat", record.id) for record in library.newest_first()]
    if current.record.id not in library.records:
        rows.insert(0, ("New chat", current.record.id))
    return rows


def _pair(turn: ShownTurn, is_running: bool) -> list[dict[str, Any]]:
    answer = inert(turn.answer)
    if turn.note:
        answer += f"\n{open_fence(turn.answer)}"
        answer += f'\n\n<small class="limpet-note">{html.escape(turn.note)}</small>'
    elif not answer and is_running:
        answer = _WAITING
    return [{"role": "user", "content": inert(turn.question)}, {"role": "assistant", "content": answer}]
