"""An admin port with answers that a test sets, and a command line that sends requests to it."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from typer.testing import CliRunner

from magnetar.cli.main import make_app

if TYPE_CHECKING:
    from collections.abc import Iterator


class Broker:
    """Returns the answers that a test set for each path, and records the requests."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.answers: dict[str, tuple[int, dict[str, str], Any]] = {}
        self.asked: list[tuple[str, str, Any]] = []  # method, path, body
        self.delay_s = 0.0

    def answer(self, path: str, body: Any = None, *, status: int = 200, to: str = "") -> None:
        self.answers[path] = (status, {"location": to} if to else {}, body)


@contextmanager
def broker() -> Iterator[Broker]:
    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            size = int(self.headers.get("content-length", "0"))
            body = json.loads(self.rfile.read(size)) if size else None
            it.asked.append((self.command, self.path, body))
            time.sleep(it.delay_s)
            status, headers, answer = it.answers[self.path]
            self.send_response(status)
            data = b"" if answer is None else json.dumps(answer).encode()
            for name, value in {**headers, "content-length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_DELETE = handle_any

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    it = Broker(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield it
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def invoke(urls: str, *arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(make_app(arguments), [*arguments, "--admin-url", urls])
    return result.exit_code, result.stdout, result.stderr
