"""Pulsar's own framing over TCP, for unmodified Apache Pulsar clients.

A stream of bytes becomes a FrameStream whose frames hold one or more whole Pulsar frames. The gRPC
transport carries the same frames, so sessions do not depend on the transport.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from magnetar.broker.session.limits import HANDSHAKE_BYTES_MAX
from magnetar.protos.errors import FrameTooLarge
from magnetar.protos.framing import COMMAND_FRAME_BYTES_MAX
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.log import get_logger
from magnetar.runtime.tcp_frames import HANDLE_ERRORS

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Sequence

    from magnetar.runtime.frames import Buffer

READ_BYTES: Final = 256 << 10  # asked of the socket at once: what a coalesced frame holds
CLOSE_TIMEOUT_S: Final = 1.0
_TOTAL: Final = struct.Struct(">I")

log = get_logger(__name__)


class PulsarTcpStream:
    """One accepted connection. The contract is FrameStream's (runtime/frames.py)."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        frame_bytes_max: int = COMMAND_FRAME_BYTES_MAX,
    ) -> None:
        address = writer.get_extra_info("peername")  # None: it is closed already
        self.peer = f"{address[0]}:{address[1]}" if address else "unknown"
        self._frame_bytes_max = frame_bytes_max
        self._reader = reader
        self._writer = writer
        self._limit = HANDSHAKE_BYTES_MAX  # until the client is connected
        self._rest = bytearray()  # the beginning of an incomplete frame
        self._closed: StreamClosed | None = None  # None: open
        self._gone: asyncio.Event | None = None  # set once closed; None: not closing

    async def send(self, parts: Sequence[Buffer]) -> None:
        if self._closed is not None:
            raise self._closed
        try:
            self._writer.writelines(parts)
            await self._writer.drain()
        except HANDLE_ERRORS as error:
            raise self._end(f"connection lost: {error}", clean=False) from error

    async def receive(self) -> memoryview:
        while self._closed is None:
            whole = self._whole_bytes()
            if whole:
                frame = bytes(memoryview(self._rest)[:whole])
                del self._rest[:whole]
                return memoryview(frame)
            try:
                data = await self._reader.read(READ_BYTES)
            except HANDLE_ERRORS as error:
                raise self._end(f"connection lost: {error}", clean=False) from error
            if not data:
                reason = "inside a frame" if self._rest else "between frames"
                raise self._end(f"the peer closed {reason}", clean=not self._rest)
            self._rest += data
        raise self._closed

    def on_connected(self) -> None:
        """The client is known: take frames of any size that the protocol has."""
        self._limit = self._frame_bytes_max

    async def close(self) -> None:
        self._end("closed here", clean=True)
        if self._gone is not None:
            await self._gone.wait()
            return
        # Only one task waits for the writer: cancelling one would cancel it for all.
        self._gone, abort = asyncio.Event(), self._writer.transport.abort
        loop = asyncio.get_running_loop()
        timer = loop.call_later(CLOSE_TIMEOUT_S, abort)  # a peer that does not read
        try:
            with suppress(*HANDLE_ERRORS):  # lost before it was closed
                await self._writer.wait_closed()
        finally:
            timer.cancel()
            with suppress(RuntimeError):  # uvloop's, on a closed handle
                abort()
            self._gone.set()

    def _whole_bytes(self) -> int:
        """How many of the received bytes are whole frames. Ends the stream at an oversized one."""
        at, gathered = 0, len(self._rest)
        while gathered - at >= _TOTAL.size:
            size = _TOTAL.size + int(_TOTAL.unpack_from(self._rest, at)[0])
            if size > self._limit:
                if at:  # the frames before it may be the CONNECT
                    break
                reason = str(FrameTooLarge(size, self._limit))
                log.warning("closing a connection", peer=self.peer, reason=reason)
                raise self._end(reason, clean=False)
            if at + size > gathered:
                break
            at += size
        return at

    def _end(self, reason: str, *, clean: bool) -> StreamClosed:
        if self._closed is None:  # the first end counts
            self._closed = StreamClosed(reason, clean=clean)
            with suppress(*HANDLE_ERRORS):
                self._writer.close()
        return self._closed


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
        self._streams: dict[PulsarTcpStream, asyncio.Task[Any]] = {}  # and the task that handles it

    @property
    def connection_count(self) -> int:
        """Connections that are open."""
        return len(self._streams)

    async def start(self, listener: socket.socket) -> None:
        """Accept on a bound socket (runtime/listener.py), which this takes over."""
        self._server = await asyncio.start_server(
            self._accepted, sock=listener, limit=2 * READ_BYTES
        )

    async def stop(self) -> None:
        """Stop listening, close every connection, and wait for their handlers."""
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
            for task in late:  # they wait for requests that do not end
                task.cancel()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = PulsarTcpStream(reader, writer, frame_bytes_max=self._frame_bytes_max)
        task = asyncio.current_task()
        assert task is not None
        self._streams[stream] = task
        try:
            await self._handle(stream)
        finally:
            await stream.close()
            del self._streams[stream]
