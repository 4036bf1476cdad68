"""The page: layout, and which event calls which handler."""

from pathlib import Path
from typing import Any

import gradio as gr

from limpet.webui.controls import Controls
from limpet.webui.handlers import Handlers
from limpet.webui.inert_text import LATEX_DELIMITERS
from limpet.webui.server_watch import ServerWatch
from limpet.webui.tabs import Tabs

# Fixed, else a restart of the page's server would empty every browser's list. The text is no secret: it only keeps the
# storage from being read at a glance.
_STORAGE_KEY, _STORAGE_SECRET = "limpet-conversations", "limpet"
_TICK_S = 2.0
_SYSTEM_FONTS = ["system-ui", "-apple-system", "Segoe UI", "Noto Sans", "sans-serif"]
_SYSTEM_MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"]
_HERE = Path(__file__).parent


def build_page(address: str) -> gr.Blocks:
    """The page for the server at `address`."""
    tabs = Tabs(address)
    handlers = Handlers(tabs, ServerWatch(tabs.client()))
    page = gr.Blocks(title="Limpet", analytics_enabled=False, fill_height=True)
    with page:
        stored = gr.BrowserState(None, storage_key=_STORAGE_KEY, secret=_STORAGE_SECRET)
        with gr.Sidebar(elem_id="limpet-sidebar"):
            new = gr.Button("New chat", elem_id="limpet-new")
            chats = gr.Radio([], show_label=False, container=False, elem_id="limpet-list")
            controls = Controls()
        with gr.Column(elem_id="limpet-main"):
            with gr.Row(elem_id="limpet-head"):
                badge = gr.HTML(elem_id="limpet-badge")
            conversation = _chatbot()
            notice = gr.HTML(elem_id="limpet-notice")
            box = gr.Textbox(
                show_label=False, placeholder="Message", max_lines=10, autofocus=True, submit_btn=True,
                elem_id="limpet-box", html_attributes=gr.InputHTMLAttributes(enterkeyhint="send"),
            )  # fmt: skip
        timer = gr.Timer(_TICK_S)
        shown = [conversation, box, notice, chats, stored]
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "concurrency_limit": None}
        answering: dict[str, Any] = {**quiet, "outputs": shown, "trigger_mode": "multiple"}
        settings = controls.components
        box.submit(handlers.submit, [box, chats, stored, *settings], **answering)
        conversation.retry(handlers.retry, [chats, stored, *settings], **answering)
        conversation.edit(handlers.edit, [chats, stored, *settings], **answering)
        box.stop(handlers.stop, [chats, stored], **quiet)
        new.click(handlers.begin, [stored], shown, **quiet)
        chats.input(handlers.select, [chats, stored], shown, **quiet)
        conversation.clear(handlers.clear, [chats, stored], shown, **quiet)
        for component in settings:
            component.change(handlers.remember, [stored, *settings], stored, trigger_mode="always_last", **quiet)
        timer.tick(handlers.tick, [controls.model, stored], [badge, controls.model, chats], **quiet)
        page.load(handlers.load, [stored], [*shown, badge, *settings], **quiet)
        page.unload(handlers.unload)
    return page


def launch_options() -> dict[str, Any]:
    """What `Blocks.launch` is told of the page's looks; system fonts, for nothing may be fetched from elsewhere."""
    return {
        "theme": gr.themes.Soft(font=_SYSTEM_FONTS, font_mono=_SYSTEM_MONO),
        "css_paths": _HERE / "page.css",
        "head": f"<script>{(_HERE / 'page.js').read_text('utf-8')}</script>",
        "footer_links": [],
    }


def _chatbot() -> gr.Chatbot:
    return gr.Chatbot(
        show_label=False,
        elem_id="limpet-chat",
        height="100%",
        layout="bubble",
        editable="user",
        buttons=["copy"],
        latex_delimiters=LATEX_DELIMITERS,
        line_breaks=True,
        allow_tags=False,
        placeholder="Ask something.",
    )
