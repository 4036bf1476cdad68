"""Runs the page's web server until it is interrupted."""

import signal

from starlette.middleware import Middleware

from limpet.webui.headers import SecurityHeaders
from limpet.webui.page import build_page, launch_options


def serve(server: str, host: str, port: int, auth: tuple[str, str] | None, root_path: str) -> None:
    """Blocks until Ctrl-C or SIGTERM; raises OSError if the port cannot be used."""
    page = build_page(server)
    page.queue(default_concurrency_limit=None)
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
        app_kwargs={"middleware": [Middleware(SecurityHeaders)]},
        **launch_options(),
    )
    print(f"limpet-webui: http://{host}:{port}{root_path} talks to {server}; Ctrl-C stops it.", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        signal.pause()
    except KeyboardInterrupt:
        page.close(verbose=False)
