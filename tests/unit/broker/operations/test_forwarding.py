"""Requests for lists to other brokers. A bounded number of requests runs at once, and all share one
deadline."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from magnetar.broker.admin.forwarding import LISTS_MAX, fetch_all
from magnetar.broker.operations.errors import NotForwarded

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.real_loop


class Other:
    """Another broker. It answers when `open` is set, with the path as the only name."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.open = threading.Event()
        self.under_way = 0
        self.most = 0


@contextmanager
def other_broker() -> Iterator[Other]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with lock:
                it.under_way += 1
                it.most = max(it.most, it.under_way)
            it.open.wait(30.0)
            time.sleep(0.02)
            with lock:
                it.under_way -= 1
            data = json.dumps([self.path]).encode()
            self.send_response(500 if "broken" in self.path else 200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    lock = threading.Lock()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    it = Other(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield it
    finally:
        it.open.set()
        server.shutdown()
        thread.join()
        server.server_close()


async def test_all_are_asked_together_and_a_bounded_number_at_once() -> None:
    with other_broker() as other:
        other.open.set()
        paths = [f"/{number}" for number in range(5 * LISTS_MAX)]
        found = await fetch_all([(other.url, path) for path in paths])
        assert sorted(found) == sorted(paths)
        assert other.most == LISTS_MAX


async def test_an_unresponsive_broker_is_named_at_the_deadline() -> None:
    with other_broker() as good, other_broker() as silent:
        good.open.set()
        asked = [(good.url, "/a"), (silent.url, "/b"), (good.url, "/c")]
        with pytest.raises(
            NotForwarded, match=r"/b at .* was not answered within 0\.2 s"
        ) as caught:
            await fetch_all(asked, timeout_s=0.2)
        assert caught.value.url == silent.url


async def test_a_broker_that_fails_is_named() -> None:
    with other_broker() as other:
        other.open.set()
        with pytest.raises(NotForwarded, match=r"/broken at .* was answered with status 500"):
            await fetch_all([(other.url, "/a"), (other.url, "/broken"), (other.url, "/b")])


async def test_a_request_to_no_broker_returns_an_empty_list() -> None:
    assert await fetch_all([]) == []
