"""Pulsar's own framing over TCP, for unmodified Apache Pulsar clients.

A stream of bytes becomes a FrameStream whose frames hold one or more whole Pulsar frames. The gRPC
transport carries the same frames, so sessions do not depend on the transport.

A connection keeps received bytes until its session takes them. The bytes of one socket read are
passed on without a copy; the bytes of several reads are joined once. `data_received` does not
look for frames. `receive` does, because the limit of a frame depends on whether the session has
answered CONNECT.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Final, cast

from magnetar.broker.session.limits import HANDSHAKE_BYTES_MAX
from magnetar.protos.errors import FrameTooLarge
from magnetar.protos.framing import COMMAND_FRAME_BYTES_MAX
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.log import get_logger
from magnetar.runtime.tcp_frames import HANDLE_ERRORS, wake, write_parts

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Sequence

    from magnetar.runtime.frames import Buffer

READ_AHEAD_BYTES: Final = 256 << 10
"""The transport stops reading when this many bytes wait beyond the frame that is being received.
The limit equals FRAME_BYTES_MAX (runtime/frames.py), the size at which an outbox ends a frame. One
more socket read (up to 256 KB) may exceed it."""

CLOSE_TIMEOUT_S: Final = 1.0
_TOTAL: Final = struct.Struct(">I")

log = get_logger(__name__)


class PulsarTcpStream(asyncio.Protocol):
    """The broker's end of one connection: a `FrameStream` (runtime/frames.py), and the protocol of
    its transport. `PulsarServer` makes it."""

    def __init__(
        self,
        on_open: Callable[[PulsarTcpStream], None],
        *,
        frame_bytes_max: int = COMMAND_FRAME_BYTES_MAX,
    ) -> None:
        """`on_open` is called when the connection is open."""
        self.peer = "unknown"
        self._on_open = on_open
        self._frame_bytes_max = frame_bytes_max
        self._limit = HANDSHAKE_BYTES_MAX  # until the client is connected
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport  # set from `connection_made` on
        self._closed: StreamClosed | None = None  # None: open
        self._lost = asyncio.Event()  # the connection is gone
        # Receiving.
        self._data: bytes | bytearray = b""  # the bytes that no `receive` has returned yet
        self._wanted = _TOTAL.size  # the size at which `_data` may begin with a whole frame
        self._eof = False  # the peer sends no more data
        self._receiver: asyncio.Future[None] | None = None  # None: no task waits in `receive`
        self._reading_paused = False
        # Sending.
        self._sender: asyncio.Future[None] | None = None  # None: no task waits in `send`
        self._writing_paused = False

    # ---- FrameStream -----------------------------------------------------------------------------

    async def send(self, parts: Sequence[Buffer]) -> None:
        assert self._sender is None, "two tasks send on one stream"
        if self._closed is not None:
            raise self._closed
        try:
            write_parts(self._transport, parts)
        except HANDLE_ERRORS as error:
            raise self._end(f"connection lost: {error}", clean=False) from error
        while self._writing_paused and self._closed is None:
            self._sender = self._loop.create_future()
            try:
                await self._sender
            finally:
                self._sender = None
        if self._closed is not None:
            raise self._closed

    async def receive(self) -> memoryview:
        assert self._receiver is None, "two tasks receive on one stream"
        while self._closed is None:
            whole = self._whole_bytes() if len(self._data) >= self._wanted else 0
            if whole:
                frame = memoryview(self._data).toreadonly()
                self._data = bytes(frame[whole:])
                self._resume_reading()
                return frame[:whole]
            if self._eof:
                reason = "inside a frame" if self._data else "between frames"
                raise self._end(f"the peer closed {reason}", clean=not self._data)
            self._resume_reading()
            self._receiver = self._loop.create_future()
            try:
                await self._receiver
            finally:
                self._receiver = None
        raise self._closed

    def on_connected(self) -> None:
        """Accept frames of any size that the protocol allows: the client is authenticated."""
        self._limit = self._frame_bytes_max

    async def close(self) -> None:
        self._end("closed here", clean=True)
        # A peer that does not read must not keep the connection open.
        timer = self._loop.call_later(CLOSE_TIMEOUT_S, self._abort)
        try:
            await self._lost.wait()
        finally:
            timer.cancel()
            self._abort()

    # ---- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        address = transport.get_extra_info("peername")  # None: the socket is closed already
        if address:
            self.peer = f"{address[0]}:{address[1]}"
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        if self._closed is not None:
            return
        if not self._data:
            self._data = data
        else:
            if isinstance(self._data, bytes):
                self._data = bytearray(self._data)
            self._data += data
        if len(self._data) >= self._wanted:
            wake(self._receiver)
        if not self._may_read and not self._reading_paused:
            self._reading_paused = True
            with suppress(*HANDLE_ERRORS):  # `connection_lost` follows
                self._transport.pause_reading()

    def eof_received(self) -> bool:
        self._eof = True
        wake(self._receiver)
        return True  # do not close yet: received commands are executed and answered first

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        wake(self._sender)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self._eof = True
            wake(self._receiver)
        else:
            self._end(f"connection lost: {exc}", clean=False)
        self._writing_paused = False
        wake(self._sender)
        self._lost.set()

    # ---- mechanics -------------------------------------------------------------------------------

    @property
    def _may_read(self) -> bool:
        """True when the waiting bytes are fewer than the wanted frame plus READ_AHEAD_BYTES."""
        return len(self._data) < self._wanted + READ_AHEAD_BYTES

    def _resume_reading(self) -> None:
        if self._reading_paused and self._may_read:
            self._reading_paused = False
            with suppress(*HANDLE_ERRORS):
                self._transport.resume_reading()

    def _whole_bytes(self) -> int:
        """Return the number of received bytes in whole frames. End the stream at an oversized
        frame."""
        at, gathered = 0, len(self._data)
        self._wanted = _TOTAL.size
        while gathered - at >= _TOTAL.size:
            size = _TOTAL.size + int(_TOTAL.unpack_from(self._data, at)[0])
            if size > self._limit:
                if at:  # the frames before it may contain the CONNECT
                    break
                reason = str(FrameTooLarge(size, self._limit))
                log.warning("closing a connection", peer=self.peer, reason=reason)
                raise self._end(reason, clean=False)
            if at + size > gathered:
                self._wanted = size
                break
            at += size
        return at

    def _end(self, reason: str, *, clean: bool) -> StreamClosed:
        if self._closed is None:  # the first end counts
            self._closed = StreamClosed(reason, clean=clean)
            self._data = b""
            wake(self._receiver)
            wake(self._sender)
            with suppress(*HANDLE_ERRORS):
                self._transport.close()
        return self._closed

    def _abort(self) -> None:
        with suppress(*HANDLE_ERRORS):
            self._transport.abort()


class PulsarServer:
    """Accepts connections and hands each to `handle` as a FrameStream, until it is stopped."""

    def __init__(
        self,
        handle: Callable[[PulsarTcpStream], Awaitable[None]],
        *,
        frame_bytes_max: int = COMMAND_FRAME_BYTES_MAX,
    ) -> None:
        self._handle = handle
        self._frame_bytes_max = frame_bytes_max
        self._server: asyncio.Server | None = None
        # Each stream, and the task of its handler.
        self._streams: dict[PulsarTcpStream, asyncio.Task[None]] = {}

    @property
    def connection_count(self) -> int:
        """The number of open connections."""
        return len(self._streams)

    async def start(self, listener: socket.socket, group: asyncio.TaskGroup) -> None:
        """Accept connections on a bound socket (runtime/listener.py), which the server closes when
        it stops. The handlers run in `group`; none of them fails."""

        def on_open(stream: PulsarTcpStream) -> None:
            self._streams[stream] = group.create_task(self._serve(stream))

        self._server = await asyncio.get_running_loop().create_server(
            lambda: PulsarTcpStream(on_open, frame_bytes_max=self._frame_bytes_max), sock=listener
        )

    async def stop(self) -> None:
        """Stop listening, close every connection, and wait for the handlers."""
        if self._server is None:
            return
        self._server.close()
        async with asyncio.TaskGroup() as group:
            for stream in list(self._streams):
                group.create_task(stream.close())
        await self._end_handlers()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._server.wait_closed()

    async def _end_handlers(self) -> None:
        handlers = list(self._streams.values())
        if handlers:
            _, late = await asyncio.wait(handlers, timeout=CLOSE_TIMEOUT_S)
            for task in late:  # the handlers wait for requests that do not end
                task.cancel()

    async def _serve(self, stream: PulsarTcpStream) -> None:
        try:
            await self._handle(stream)
        except Exception as error:  # the transport's edge: the error ends this connection only
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a handler of connections failed", "exception": error}
            )
        finally:
            try:
                await stream.close()
            finally:
                del self._streams[stream]
