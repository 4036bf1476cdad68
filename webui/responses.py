"""What a handler sends to the page of the conversation shown."""

from typing import Any, NamedTuple

import gradio as gr

from limpet.webui import view
from limpet.webui.tabs import Tab


class Conversation(NamedTuple):
    """What the page has of the conversation shown, in page.py's order; by default all stays as it is."""

    messages: Any = gr.skip()
    field: Any = gr.skip()
    notice: Any = gr.skip()
    chats: Any = gr.skip()
    stored: Any = gr.skip()
    following: Any = gr.skip()  # the timer
    version: Any = gr.skip()


SAME = Conversation()


def conversation(tab: Tab, notice: str = "", text: str | None = None) -> Conversation:
    """Everything of the conversation shown.

    `text` None leaves what stands in the text field, unless the server refused a new question: that comes back.
    """
    chat = tab.current
    ended, chat.ended = chat.ended, None
    if ended is not None:
        notice = notice or str(ended.error or "")
        text = ended.question if ended.left_out and text is None else text
    running = chat.is_running
    field = {**gr.update(submit_btn=not running, stop_btn=running), **({} if text is None else {"value": text})}
    tab.notice = notice
    return Conversation(
        messages=view.messages(chat),
        field=field,
        notice=view.notice(notice),
        chats=changed_list(tab),
        stored=tab.store(),
        following=gr.Timer(active=running),
        version=tab.next_version(),
    )


def changed_list(tab: Tab) -> Any:
    """The list of conversations; nothing if the page has it already."""
    rows = view.titles(tab)
    listed = (rows, tab.current.record.id)
    if tab.listed == listed:
        return gr.skip()
    tab.listed = listed
    return gr.update(choices=rows, value=tab.current.record.id)
