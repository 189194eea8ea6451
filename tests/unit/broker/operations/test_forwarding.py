"""Requests for lists to other brokers. A bounded number of requests runs at once, and all share one
deadline."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest
from support import wait_until

from magnetar.broker.admin import forwarding
from magnetar.broker.admin.forwarding import LISTS_MAX, fetch_all
from magnetar.broker.operations.errors import NotForwarded

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.real_loop


class Other:
    """Another broker. It answers as many requests as `answer` allows."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.room = threading.Semaphore(0)
        self.asked = 0
        self.answered = 0
        self.body: bytes | None = None  # None: the path as the only name

    def answer(self, count: int) -> None:
        self.room.release(count)

    @property
    def under_way(self) -> int:
        return self.asked - self.answered


@contextmanager
def other_broker() -> Iterator[Other]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with lock:
                it.asked += 1
            it.room.acquire(timeout=30.0)
            with lock:
                it.answered += 1
            data = json.dumps([self.path]).encode() if it.body is None else it.body
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
        it.answer(100)
        server.shutdown()
        thread.join()
        server.server_close()


async def test_all_are_asked_together_and_a_bounded_number_at_once() -> None:
    with other_broker() as other:
        paths = [f"/{number}" for number in range(5 * LISTS_MAX)]
        async with asyncio.TaskGroup() as tasks:
            fetching = tasks.create_task(fetch_all([(other.url, path) for path in paths]))
            for answered in range(len(paths)):
                expected = min(LISTS_MAX, len(paths) - answered)
                await wait_until(lambda count=expected: other.under_way >= count, deadline_s=30)
                assert other.under_way == expected
                other.answer(1)
                await wait_until(lambda count=answered: other.answered > count, deadline_s=30)
        assert sorted(fetching.result()) == sorted(paths)


async def test_an_unresponsive_broker_is_named_at_the_deadline() -> None:
    with other_broker() as good, other_broker() as silent:
        good.answer(10)
        asked = [(good.url, "/a"), (silent.url, "/b"), (good.url, "/c")]
        with pytest.raises(
            NotForwarded, match=r"/b at .* was not answered within 0\.2 s"
        ) as caught:
            await fetch_all(asked, timeout_s=0.2)
        assert caught.value.url == silent.url


async def test_answers_that_arrive_together_with_the_deadline_are_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def answered(_call: object, _url: str, path: str) -> list[str]:
        return [path]

    monkeypatch.setattr(forwarding, "in_thread", answered)
    asked = [("http://a", "/p"), ("http://b", "/q")]
    assert await fetch_all(asked, timeout_s=0) == ["/p", "/q"]


@pytest.mark.parametrize("answer", [b"", b"<html>", b'["a"', b'{"a": 1}', b"[1]", b"[" * 9_999])
async def test_a_broker_that_answers_with_no_list_of_names_is_named(answer: bytes) -> None:
    with other_broker() as other:
        other.body = answer
        other.answer(10)
        with pytest.raises(NotForwarded, match=r"/a at .* was not answered with a list of names"):
            await fetch_all([(other.url, "/a")])


async def test_a_broker_that_fails_is_named() -> None:
    with other_broker() as other:
        other.answer(10)
        with pytest.raises(NotForwarded, match=r"/broken at .* was answered with status 500"):
            await fetch_all([(other.url, "/a"), (other.url, "/broken"), (other.url, "/b")])


async def test_a_request_to_no_broker_returns_an_empty_list() -> None:
    assert await fetch_all([]) == []
