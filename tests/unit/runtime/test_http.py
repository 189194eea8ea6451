"""The HTTP port over a real socket."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fakes.stepped_loop import SteppedLoop
from prometheus_client import CollectorRegistry
from support import free_port, settle, wait_until

from magnetar.runtime.errors import PortInUse
from magnetar.runtime.http import BaseApp, Health, serve_http
from magnetar.runtime.listener import bind_port, port_of
from magnetar.runtime.metrics import counter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from magnetar.runtime.http import App

pytestmark = pytest.mark.real_loop


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[httpx.AsyncClient]:
    listener = bind_port("127.0.0.1", 0)
    url = f"http://127.0.0.1:{port_of(listener)}"
    async with asyncio.TaskGroup() as group:
        server = group.create_task(serve_http(app, listener))
        async with httpx.AsyncClient(base_url=url) as client:
            yield client
        server.cancel()


def healthy() -> Health:
    return Health("bookie", "b1", "READY", ready=True, details={"entries": 3})


async def index_of(app: BaseApp) -> str:
    async with serving(app) as client:
        answer = await client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    return answer.text


async def test_the_index_links_to_the_pages_that_are_there() -> None:
    async def api(*_: object) -> None:
        raise AssertionError("not asked")

    page = await index_of(BaseApp(healthy, CollectorRegistry()))
    assert '<a href="/health">' in page
    assert '<a href="/metrics">' in page
    assert "/docs" not in page
    assert '<a href="/docs">' in await index_of(BaseApp(healthy, CollectorRegistry(), lambda: api))
    hostile = Health("bookie", "<b>1", "READY", ready=True)
    assert "&lt;b&gt;1" in await index_of(BaseApp(lambda: hostile, CollectorRegistry()))


async def test_the_index_says_the_role_once_if_it_is_the_id_too() -> None:
    alone = Health("standalone", "standalone", "serving", ready=True)
    page = await index_of(BaseApp(lambda: alone, CollectorRegistry()))
    assert "<h1>Magnetar standalone</h1>" in page
    assert "<h1>Magnetar bookie b1</h1>" in await index_of(BaseApp(healthy, CollectorRegistry()))


async def test_health_is_json_with_a_status_that_a_probe_understands() -> None:
    now = healthy()

    async with serving(BaseApp(lambda: now, CollectorRegistry())) as client:
        answer = await client.get("/health")
        assert answer.status_code == 200
        assert answer.json() == {
            "role": "bookie",
            "id": "b1",
            "state": "READY",
            "entries": 3,
        }
        now = Health("bookie", "b1", "STARTING", ready=False)
        answer = await client.get("/health")
        assert answer.status_code == 503
        assert answer.json()["state"] == "STARTING"


async def test_metrics_are_prometheus_text() -> None:
    registry = CollectorRegistry()
    counter(registry, "magnetar_entries_total", "Entries.", lambda: 7)

    async with serving(BaseApp(healthy, registry)) as client:
        answer = await client.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        assert "magnetar_entries_total 7.0" in answer.text.splitlines()


async def test_metrics_have_what_was_read_for_this_scrape() -> None:
    scrapes = 0

    async def read() -> CollectorRegistry:
        nonlocal scrapes
        scrapes += 1
        registry = CollectorRegistry()
        counter(registry, "magnetar_scrapes_total", "Scrapes.", lambda: scrapes)
        return registry

    async with serving(BaseApp(healthy, CollectorRegistry(), readings=[read])) as client:
        for number in (1.0, 2.0):
            answer = await client.get("/metrics")
            assert f"magnetar_scrapes_total {number}" in answer.text.splitlines()


async def test_the_rest_is_made_once_when_it_is_first_asked_for() -> None:
    made = 0

    def make() -> App:
        nonlocal made
        made += 1
        from fastapi import FastAPI

        app = FastAPI()

        @app.get("/admin/{name}")
        async def admin(name: str) -> dict[str, str]:
            return {"name": name}

        return app

    async with serving(BaseApp(healthy, CollectorRegistry(), make)) as client:
        await client.get("/health")
        assert made == 0
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(client.get(f"/admin/{i}")) for i in range(3)]
        assert [task.result().json() for task in asked] == [{"name": str(i)} for i in range(3)]
        assert (await client.get("/nothing")).status_code == 404
    assert made == 1


async def test_an_unknown_path_is_not_found_where_there_is_no_rest() -> None:
    async with serving(BaseApp(healthy, CollectorRegistry())) as client:
        assert (await client.get("/admin")).status_code == 404


async def test_a_bug_in_a_handler_goes_to_the_process_and_an_error_is_a_500() -> None:
    stray: list[Any] = []

    def make() -> App:
        async def fail(scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError("two owners") if scope["path"] == "/bug" else KeyError("x")

        return fail

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: stray.append(context["exception"]))
    async with serving(BaseApp(healthy, CollectorRegistry(), make)) as client:
        assert (await client.get("/error")).status_code == 500
        assert stray == []
        assert (await client.get("/bug")).status_code == 500
    assert [str(error) for error in stray] == ["two owners"]


async def test_the_server_stops_although_a_connection_is_open_and_a_request_hangs() -> None:
    began = asyncio.Event()

    def make() -> App:
        async def hang(scope: Any, receive: Any, send: Any) -> None:
            began.set()
            await asyncio.Event().wait()

        return hang

    async def ask(client: httpx.AsyncClient) -> None:
        with pytest.raises(httpx.HTTPError):
            (await client.get("/hang")).raise_for_status()

    port = free_port()  # not one that the kernel may give to a connection meanwhile
    listener = bind_port("127.0.0.1", port)
    url = f"http://127.0.0.1:{port}"
    loop = asyncio.get_running_loop()
    app = BaseApp(healthy, CollectorRegistry(), make)
    async with httpx.AsyncClient(base_url=url) as client, asyncio.TaskGroup() as group:
        server = group.create_task(serve_http(app, listener))
        await client.get("/health")
        group.create_task(ask(client))
        await began.wait()
        begin_s = loop.time()
        server.cancel()
        await asyncio.wait({server})
        assert server.cancelled()
        assert loop.time() - begin_s < 20
    bind_port("127.0.0.1", port).close()
    await wait_until(lambda: len(asyncio.all_tasks()) == 1)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /hea",
        b"GET /health HTTP/1.1\r\nHost: x\r\n",
        b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nhalf",
    ],
    ids=["nothing", "half a line", "half the headers", "half the body"],
)
async def test_half_a_request_ends_the_connection(sent: bytes) -> None:
    listener = bind_port("127.0.0.1", 0)
    port = port_of(listener)
    app = BaseApp(healthy, CollectorRegistry())
    async with asyncio.TaskGroup() as group:
        server = group.create_task(serve_http(app, listener, request_s=0.2))
        await settle()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        async with asyncio.timeout(10):
            await reader.read()
        writer.close()
        server.cancel()


def test_a_connection_may_rest_between_whole_requests() -> None:
    """The clock stands still during a request, so that a busy machine delays none."""

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        [size] = re.findall(rb"content-length: (\d+)", head)
        return head.split()[1] + await reader.readexactly(int(size))

    async def work() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SteppedLoop)
        listener = bind_port("127.0.0.1", 0)
        port = port_of(listener)
        app = BaseApp(healthy, CollectorRegistry())
        async with asyncio.TaskGroup() as group:
            server = group.create_task(serve_http(app, listener, request_s=0.1))
            await settle()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                for _ in range(3):
                    assert (await ask(reader, writer)).startswith(b"200{")
                    loop.step(0.15)
                    await settle()
            finally:
                writer.close()
                loop.go_on()  # the stop of the server takes time
            server.cancel()

    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        runner.run(work())


@pytest.mark.parametrize("turns", range(1, 8))  # at turn 0 the caller still owns the socket
async def test_the_server_can_be_cancelled_while_it_starts(turns: int) -> None:
    port = free_port()
    listener = bind_port("127.0.0.1", port)
    async with asyncio.TaskGroup() as group:
        server = group.create_task(serve_http(BaseApp(healthy, CollectorRegistry()), listener))
        await settle(turns)
        server.cancel()
    bind_port("127.0.0.1", port).close()


async def test_the_server_installs_no_signal_handlers() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    inside = {}
    async with serving(BaseApp(healthy, CollectorRegistry())) as client:
        await client.get("/health")
        inside[signal.SIGTERM] = signal.getsignal(signal.SIGTERM)
    assert inside[signal.SIGTERM] == before[signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_port_in_use_is_named() -> None:
    listener = bind_port("127.0.0.1", 0)
    listener.listen()
    with pytest.raises(PortInUse, match=f"port {port_of(listener)} on 127.0.0.1"):
        bind_port("127.0.0.1", port_of(listener))
    listener.close()


def test_fastapi_is_not_imported_before_it_is_needed() -> None:
    import subprocess

    code = "import sys, magnetar.runtime.http; sys.exit('fastapi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
