"""The HTTP port of a server: links, health, metrics, and the API that the role adds."""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from magnetar.runtime.log import get_logger
from magnetar.runtime.supervise import is_bug

if TYPE_CHECKING:
    import socket

    from prometheus_client import CollectorRegistry, Metric
    from prometheus_client.registry import Collector

log = get_logger(__name__)

STOP_S = 1
"""A stopping server waits this long for open requests, then cancels them. uvicorn takes whole
seconds only."""

REQUEST_S = 10.0
"""The time limit for receiving a whole request. It begins with the first byte of the request; for
the first request it begins with the connection. A client that sends half a request is
disconnected."""

Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]
"""An ASGI application."""


@dataclass(frozen=True, slots=True)
class Health:
    """The answer of GET /health; the status is 200 if `ready`, else 503."""

    role: str
    id: str
    state: str
    ready: bool
    details: Mapping[str, object] = field(default_factory=dict)


class BaseApp:
    """Serves /, /health and /metrics itself, everything else through the application of `rest`.

    `rest` is called once, in a thread, at the first request for another path. Importing FastAPI
    takes a third of a second and 30 MB. A server that gets no such request never imports it.
    """

    def __init__(
        self,
        health: Callable[[], Health],
        registry: CollectorRegistry,
        rest: Callable[[], App] | None = None,
        readings: Sequence[Callable[[], Awaitable[Collector]]] = (),
    ) -> None:
        """`readings`: functions that make a collector for each scrape. A thread reads these
        collectors."""
        self._health = health
        self._registry = registry
        self._readings = readings
        self._make_rest = rest
        self._rest: App | None = None  # None: no request has needed it yet
        self._making = asyncio.Lock()

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        assert scope["type"] == "http", "the server is configured for HTTP alone"
        if scope["path"] == "/":
            await _respond(send, 200, *self._answer_index())
        elif scope["path"] == "/health":
            await _respond(send, *self._answer_health())
        elif scope["path"] == "/metrics":
            await _respond(send, 200, *await self._answer_metrics())
        elif self._make_rest is None:
            await _respond(send, 404, b'{"reason": "not found"}', "application/json")
        else:
            await self._pass_on(self._make_rest, scope, receive, send)

    def _answer_index(self) -> tuple[bytes, str]:
        health = self._health()
        pages = {"/health": "health, as JSON", "/metrics": "metrics, for Prometheus"}
        if self._make_rest is not None:
            pages["/docs"] = "the admin API"
        names = dict.fromkeys((health.role, health.id))  # a standalone server has one name for both
        title = html.escape(" ".join(("Magnetar", *names)))
        links = "".join(f'<li><a href="{path}">{path}</a>: {of}</li>' for path, of in pages.items())
        page = f"<!doctype html><title>{title}</title><h1>{title}</h1><ul>{links}</ul>\n"
        return page.encode(), "text/html; charset=utf-8"

    def _answer_health(self) -> tuple[int, bytes, str]:
        health = self._health()
        body = {"role": health.role, "id": health.id, "state": health.state, **health.details}
        return 200 if health.ready else 503, json.dumps(body).encode(), "application/json"

    async def _answer_metrics(self) -> tuple[bytes, str]:
        """Return the metrics as text, and its content type. The metrics of the registry are
        collected in one step on the loop. A thread collects those of the readings and makes the
        text."""
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

        collected = CollectorRegistry(auto_describe=False)
        for read in self._readings:
            collected.register(await read())
        collected.register(_Collected(list(self._registry.collect())))
        return await asyncio.to_thread(generate_latest, collected), CONTENT_TYPE_LATEST

    async def _pass_on(
        self,
        make_rest: Callable[[], App],
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        async with self._making:
            if self._rest is None:
                self._rest = await asyncio.to_thread(make_rest)
        try:
            await self._rest(scope, receive, send)
        except Exception as error:
            if is_bug(error):
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "a bug in an HTTP handler", "exception": error}
                )
            raise  # uvicorn logs it and answers 500


class _Collected:
    """A collector that returns metrics which were collected before."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Sequence[Metric]:
        return self._metrics


async def serve_http(app: App, listener: socket.socket, *, request_s: float = REQUEST_S) -> None:
    """Serve `app` on a socket of `bind_port` until cancelled, then stop within about two seconds
    and close the socket. A request may take `request_s` to arrive.

    Run this function in the TaskGroup of the process.
    """
    server = _Server(
        uvicorn.Config(
            app,
            loop="none",
            http=cast("Any", partial(_Protocol, request_s)),
            lifespan="off",
            ws="none",
            interface="asgi3",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=STOP_S,
        )
    )
    try:
        await server.serve(sockets=[listener])
    finally:
        if server.started:
            await server.shutdown(sockets=[listener])
        listener.close()


class _Protocol(H11Protocol):
    """Limits the time for receiving a request. uvicorn limits only the time between requests."""

    def __init__(self, request_s: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._request_s = request_s
        self._deadline: asyncio.TimerHandle | None = None  # None: no request is incomplete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self._request_s, self._on_deadline)

    def handle_events(self) -> None:
        super().handle_events()
        waits = self.conn.their_state is h11.SEND_BODY or (
            self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        )
        if not waits and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif waits and self._deadline is None:
            self._deadline = self.loop.call_later(self._request_s, self._on_deadline)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _on_deadline(self) -> None:
        log.warning("incomplete HTTP request", client=self.client, after_s=self._request_s)
        self.transport.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers: the process handles signals (process.py) and cancels this server."""
        yield


async def _respond(
    send: Callable[[Message], Awaitable[None]], status: int, body: bytes, content_type: str
) -> None:
    headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", b"%d" % len(body)),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
