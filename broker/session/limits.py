"""The limits of a broker's connections: in all, from one address, and in the handshake.

The broker closes a refused connection after an ERROR that names the exceeded limit.

In the handshake a client is unknown, so the broker bounds its input: a frame has at most
HANDSHAKE_BYTES_MAX. gRPC delivers only whole messages, so over gRPC the broker learns a frame's
size too late. Therefore CONNECT travels in the metadata of the gRPC call, which gRPC bounds
(runtime/grpc_frames.py). The broker reads no message of a gRPC client before it has accepted the
CONNECT, unless the client must answer a challenge.

Over gRPC, the broker reads at most HANDSHAKES_MAX streams in the handshake at once; other streams
wait in FIFO order. While others wait, the broker closes a stream that takes longer than
HANDSHAKE_FAIR_S. `Requests` limits the requests of other gRPC calls in the same way, with
REQUESTS_READ_MAX and REQUEST_FAIR_S. It also limits their bytes. For each connection, gRPC bounds
the bytes that it buffers for waiting streams (STREAMS_MAX, STREAM_WINDOW_BYTES).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from magnetar.broker.errors import RequestRefused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

HANDSHAKE_BYTES_MAX: Final = 64 << 10
"""The size limit of a frame in the handshake. A CONNECT has some hundred bytes, or some kilobytes
with a large token."""

HANDSHAKES_MAX: Final = 32
"""The maximum number of gRPC streams in the handshake that the broker reads at once. An honest
client needs a few milliseconds. A challenged client may send 6 MB, so all together may send 192
MB."""

HANDSHAKE_FAIR_S: Final = 1.0
"""The time in seconds after which the broker closes a stream in the handshake if others wait. A
client on the other side of the world needs a third of this time."""

REQUESTS_READ_MAX: Final = 8
"""The maximum number of requests that the broker reads at once. gRPC accepts 6 MB for each request
and holds it twice: 96 MB in all."""

REQUEST_FAIR_S: Final = HANDSHAKE_FAIR_S / 4
"""The reading time in seconds after which the broker refuses a request if others wait. A request of
at most STREAM_WINDOW_BYTES is already in gRPC's window when its turn comes, so reading it needs no
round trip. With this value, slow requests free as many places per second as slow handshakes."""

REQUEST_BYTES_MAX: Final = 2 << 20
"""The size limit of one request. A thousand topics with names of the maximum length need about half
of it. Without this limit, a request could have the size of the largest gRPC frame."""

REQUEST_FIELDS_MAX: Final = 6_000
"""The maximum number of fields in one request. A HoldTopics request for a thousand topics has
5,003. Each field may be a topic's name, which takes 3 us to check. Without this limit, 2 MB of
empty topic names would take 3 s."""

REQUESTS_BYTES_MAX: Final = 64 << 20
"""The limit of the bytes of all requests that the broker is answering. Beyond this limit it refuses
requests. The request of an honest client has some kilobytes."""


class ConnectionLimits:
    """Pulsar's brokerMaxConnections and brokerMaxConnectionsPerIp. 0: no limit."""

    def __init__(self, connections_max: int = 0, per_address_max: int = 0) -> None:
        self.connections = 0
        self.ended = 0  # the number of ended connections so far
        self.refused = 0
        self._connections_max = connections_max
        self._per_address_max = per_address_max
        self._by_address: Counter[str] = Counter()

    def enter(self, peer: str) -> str | None:
        """Count a connection, until `leave`. Returns the reason of a refusal. None: the broker
        admits the connection."""
        address = address_of(peer)
        refusal = None
        if 0 < self._connections_max <= self.connections:
            refusal = f"the broker has {self._connections_max} connections, which is its limit"
        elif 0 < self._per_address_max <= self._by_address[address]:
            refusal = (
                f"the broker has {self._per_address_max} connections from {address}, which is its "
                "limit for one address"
            )
        if refusal is not None:
            self.refused += 1
            return refusal
        self.connections += 1
        self._by_address[address] += 1
        return None

    def leave(self, peer: str) -> None:
        address = address_of(peer)
        self.connections -= 1
        self.ended += 1
        self._by_address[address] -= 1
        if self._by_address[address] == 0:
            del self._by_address[address]


class Handshakes:
    """The gRPC streams in the handshake, or the requests of other gRPC calls. The broker reads at
    most `places` of them at once."""

    def __init__(self, places: int = HANDSHAKES_MAX, *, fair_s: float = HANDSHAKE_FAIR_S) -> None:
        self._places = asyncio.Semaphore(places)
        self._fair_s = fair_s
        # For each held place, the time when it was granted, and the function that ends its stream.
        self._running: dict[object, tuple[float, Callable[[], None]]] = {}
        self._waiting = 0
        self._timer: asyncio.TimerHandle | None = None  # None: no stream waits

    @asynccontextmanager
    async def place(self, give_up: Callable[[], None]) -> AsyncIterator[Callable[[], None]]:
        """Wait for a place, and hold it until the caller calls the yielded function or leaves the
        block. If the stream holds the place longer than `fair_s` while others wait, `give_up` is
        called; it must end the stream."""
        await self._acquire()
        key = object()
        self._running[key] = asyncio.get_running_loop().time(), give_up

        def release() -> None:
            if self._running.pop(key, None) is not None:
                self._places.release()

        try:
            yield release
        finally:
            release()

    async def _acquire(self) -> None:
        self._waiting += 1
        try:
            if self._places.locked() and self._timer is None:
                self._end_slow()
            await self._places.acquire()
        finally:
            self._waiting -= 1

    def _end_slow(self) -> None:
        """If streams wait, end the streams that have held their places for too long."""
        self._timer = None
        if self._waiting == 0:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        for since, give_up in list(self._running.values()):
            if now - since >= self._fair_s:
                give_up()
        self._timer = loop.call_later(self._fair_s / 2, self._end_slow)


class Requests:
    """The requests of gRPC calls other than sessions. The broker reads at most REQUESTS_READ_MAX
    requests at once. All requests that it is answering have at most REQUESTS_BYTES_MAX."""

    def __init__(self) -> None:
        self._reading = Handshakes(REQUESTS_READ_MAX, fair_s=REQUEST_FAIR_S)
        self._bytes = 0

    @asynccontextmanager
    async def hold(self, read: Callable[[], Awaitable[bytes]]) -> AsyncIterator[bytes]:
        """Read a request, and count its bytes until the caller leaves the block. Raises
        RequestRefused."""
        request = await self._read(read)
        size = len(request)
        if size > REQUEST_BYTES_MAX:
            del request  # the traceback would keep the bytes until the garbage collector runs
            raise RequestRefused(f"it has {size} bytes; at most {REQUEST_BYTES_MAX} are allowed")
        if self._bytes + size > REQUESTS_BYTES_MAX:
            raise RequestRefused(f"requests of {self._bytes} bytes are being answered; try again")
        self._bytes += size
        try:
            yield request
        finally:
            self._bytes -= size

    async def _read(self, read: Callable[[], Awaitable[bytes]]) -> bytes:
        loop = asyncio.get_running_loop()

        def give_up() -> None:
            if not slow.expired():  # otherwise the read has been cancelled and is ending
                slow.reschedule(loop.time())

        try:
            async with asyncio.timeout(None) as slow:
                async with self._reading.place(give_up):
                    return await read()
        except TimeoutError:
            reason = f"reading it took longer than {REQUEST_FAIR_S:g} s while others waited"
            raise RequestRefused(reason) from None


def address_of(peer: str) -> str:
    """Return the address in a peer's name such as "127.0.0.1:5" or "::1:5". gRPC writes these names
    as "ipv4:127.0.0.1:5" and "ipv6:%5B::1%5D:5"."""
    text = unquote(peer)
    for scheme in ("ipv4:", "ipv6:"):
        text = text.removeprefix(scheme)
    host, _, _ = text.rpartition(":")
    return host.strip("[]") or text
