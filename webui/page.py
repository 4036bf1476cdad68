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
_TICK_S, _FOLLOW_S = 2.0, 0.1
_SYSTEM_FONTS = ["system-ui", "-apple-system", "Segoe UI", "Noto Sans", "sans-serif"]
_SYSTEM_MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"]
_HERE = Path(__file__).parent


def build_page(tabs: Tabs) -> gr.Blocks:
    """The page, for the server that `tabs` talk to."""
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
                label="Message", show_label=False, placeholder="Message", max_lines=10, autofocus=True, submit_btn=True,
                elem_id="limpet-box", html_attributes=gr.InputHTMLAttributes(enterkeyhint="send"),
            )  # fmt: skip
        version = gr.Number(0, visible=False)
        ticks, following = gr.Timer(_TICK_S), gr.Timer(_FOLLOW_S, active=False)
        settings = controls.components
        shown = [conversation, box, notice, chats, stored, following, version]
        # Without Gradio's queue: it keeps a connection open for each tab, of which a browser allows six in all.
        # And without its checks of what is sent: it refuses with a 500. The handlers take whatever a page holds.
        plain: dict[str, Any] = {
            "queue": False, "preprocess": False, "show_progress": "hidden", "api_visibility": "private",
        }  # fmt: skip
        shows: dict[str, Any] = {**plain, "outputs": shown, "trigger_mode": "multiple"}
        sending = box.submit(
            handlers.submit, [box, chats, stored, *settings], js="(...values) => limpet.send(...values)", **shows
        )
        sending.success(None, js="() => limpet.delivered()")
        sending.failure(None, js="() => limpet.refused()")
        box.stop(handlers.stop, [chats, stored], **shows)
        conversation.retry(handlers.retry, [chats, stored, *settings], **shows)
        conversation.edit(handlers.edit, [chats, stored, *settings], **shows)
        conversation.clear(handlers.clear, [chats, stored], **shows)
        new.click(handlers.begin, [stored], **shows)
        chats.input(handlers.select, [chats, stored], **shows)
        following.tick(handlers.follow, None, shown, **plain)
        ticks.tick(handlers.tick, [controls.model, version], [badge, controls.model, *shown], **plain)
        for component in settings:
            component.change(handlers.remember, [stored, *settings], stored, trigger_mode="always_last", **plain)
        page.load(handlers.load, [stored], [*shown, badge, *settings], **plain)
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
        autoscroll=False,  # page.js follows the answer
        placeholder="Ask something.",
    )
