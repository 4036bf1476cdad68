"""A web server that shows another one under a path, as nginx does with proxy_pass."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length"}


def _handler(target: str, path: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(path):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            connection = http.client.HTTPConnection(urlsplit(target).netloc, timeout=60)
            headers = {**dict(self.headers), "X-Forwarded-Host": self.headers["Host"], "X-Forwarded-Proto": "http"}
            connection.request(self.command, self.path.removeprefix(path) or "/", body, headers)
            self._pass_on(connection.getresponse())
            connection.close()

        do_POST = do_GET
        do_HEAD = do_GET

        def _pass_on(self, response: http.client.HTTPResponse) -> None:
            content = response.read()
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in _HOP_BY_HOP:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            """Quiet."""

    return Handler


@contextmanager
def path_proxy(target: str, path: str) -> Iterator[str]:
    """Shows `target` under `path`; yields the address there."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(target, path))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{path}/"
    finally:
        server.shutdown()
        server.server_close()
