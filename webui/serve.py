"""Runs the page's web server until it is interrupted."""

import signal

from starlette.middleware import Middleware

from limpet.webui.middleware import LeaveRoute, SecurityHeaders
from limpet.webui.page import build_page, launch_options
from limpet.webui.tabs import Tabs


def serve(server: str, host: str, port: int, auth: tuple[str, str] | None, root_path: str) -> None:
    """Blocks until Ctrl-C or SIGTERM; raises OSError if the port cannot be used."""
    tabs = Tabs(server)
    page = build_page(tabs)
    page.launch(
        server_name=host,
        server_port=port,
        auth=auth,
        root_path=root_path or None,
        prevent_thread_lock=True,
        quiet=True,
        share=False,
        ssr_mode=False,
        enable_monitoring=False,
        app_kwargs={"middleware": [Middleware(SecurityHeaders), Middleware(LeaveRoute, leave=tabs.close)]},
        **launch_options(),
    )
    print(f"limpet-webui: http://{host}:{port}{root_path} talks to {server}; Ctrl-C stops it.", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        signal.pause()
    except KeyboardInterrupt:
        page.close(verbose=False)
