"""Opens session streams over Pulsar's own framing on TCP, with or without TLS.

Each frame that `receive` returns holds one or more whole frames of Pulsar (protos/framing.py). The
gRPC transport carries the same frames, so a session does not depend on the transport. Pulsar's
framing has no goodbye: an end of the connection between two frames is a clean end.

`TcpFrameStream` in runtime/tcp_frames.py queues and waits in the same way, but has no base class in
common with `PulsarStream`. It is connected when it is created, says goodbye, sends beats, and sets
deadlines for its peer. A common base class would distinguish the two at each of these points, on
each frame. This module imports its functions without state from runtime/tcp_frames.py.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from magnetar.client.session.service_url import host_and_port
from magnetar.protos.errors import FrameTooLarge
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.tcp_frames import (
    HANDLE_ERRORS,
    READ_HIGH_BYTES,
    set_up,
    wake,
    write_parts,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from magnetar.client.session.pool import Purpose
    from magnetar.runtime.frames import Buffer, FrameStream

FRAME_LIMIT_BYTES: Final = 64 << 20
"""The largest frame that this end gathers. A session enforces the broker's own limit, which is
lower; this limit bounds the memory that a faulty broker can take."""

CLOSE_S: Final = 1.0
"""The longest time in seconds for which a close waits until the kernel has taken all sent bytes."""

_TOTAL: Final = struct.Struct(">I")


class PulsarDialer:
    """Opens one TCP connection for each stream."""

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        tls: ssl.SSLContext | None = None,  # None: not encrypted
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls

    def open(self, broker: str, _: Purpose) -> FrameStream:
        return PulsarStream(
            host_and_port(broker), connect_timeout_s=self._connect_timeout_s, tls=self._tls
        )

    async def close(self) -> None:
        """Release nothing: each stream has its own connection."""


class PulsarStream(asyncio.Protocol):
    """The client's end of one connection: a `FrameStream`, and the protocol of its transport.

    The first `send` or `receive` connects. It raises StreamClosed if no broker answers.
    """

    def __init__(
        self, address: str, *, connect_timeout_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        """`address` is "host:port". `connect_timeout_s` includes the handshake of TLS."""
        self.peer = address
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._connected: asyncio.Event | None = None  # None: nothing has begun to connect
        self._connecting: asyncio.Timeout | None = None  # None: no attempt is under way
        self._transport: asyncio.Transport | None = None  # None: not connected
        self._end: tuple[str, bool] | None = None  # reason, clean; None: open
        self._lost = asyncio.Event()  # the connection is gone
        # Receiving.
        self._frames: deque[memoryview] = deque()
        self._frames_bytes = 0
        self._partial = bytearray()  # the beginning of an incomplete frame
        self._partial_wanted = 0  # the size with which `_partial` holds a whole frame
        self._receiver: asyncio.Future[None] | None = None  # None: no task waits in `receive`
        self._reading_paused = False
        # Sending.
        self._sender: asyncio.Future[None] | None = None  # None: no task waits in `send`
        self._writing_paused = False

    # FrameStream

    async def send(self, parts: Sequence[Buffer]) -> None:
        assert self._sender is None, "two tasks send on one stream"
        transport = self._transport or await self._connection()
        if self._end is not None:
            raise self._closed()
        try:
            write_parts(transport, parts)
        except HANDLE_ERRORS as error:
            self._stop(f"connection lost: {error}", clean=False)
            raise self._closed() from error
        if self._writing_paused:
            await self._wait_writable()

    async def receive(self) -> memoryview:
        assert self._receiver is None, "two tasks receive on one stream"
        if self._transport is None:
            await self._connection()
        while not self._frames:
            if self._end is not None:
                raise self._closed()
            self._receiver = self._loop.create_future()
            try:
                await self._receiver
            except asyncio.CancelledError:
                self._abort("cancelled here")
                raise
            finally:
                self._receiver = None
        frame = self._frames.popleft()
        self._frames_bytes -= len(frame)
        if self._reading_paused and self._frames_bytes < READ_HIGH_BYTES // 2:
            self._resume_reading()
        return frame

    async def close(self) -> None:
        self._stop("closed here", clean=True)
        self._frames.clear()
        transport = self._transport
        if transport is None:
            return
        with suppress(*HANDLE_ERRORS):
            transport.close()  # after it has sent the buffered bytes
        timer = self._loop.call_later(CLOSE_S, self._abort, "closed here")
        try:
            await self._lost.wait()
        except asyncio.CancelledError:
            self._abort("cancelled here")
            raise
        finally:
            timer.cancel()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = set_up(transport)
        if self._end is not None:  # the stream was closed while it connected
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._end is not None:
            return
        if self._partial:
            self._partial += data
            if len(self._partial) < self._partial_wanted:
                return
            gathered, self._partial = self._partial, bytearray()
            view = memoryview(gathered)
        else:
            view = memoryview(data)
        whole = self._whole_bytes(view)
        if whole < len(view):
            self._partial += view[whole:]
        if whole:
            self._frames.append(view[:whole])
            self._frames_bytes += whole
            wake(self._receiver)
            if self._frames_bytes >= READ_HIGH_BYTES and self._transport is not None:
                self._reading_paused = True
                with suppress(*HANDLE_ERRORS):  # `connection_lost` follows
                    self._transport.pause_reading()

    def eof_received(self) -> None:
        """Stop. The transport closes itself after this call."""
        where = "inside a frame" if self._partial else "between frames"
        self._stop(f"the broker closed the connection {where}", clean=not self._partial)

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        wake(self._sender)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(f"connection lost: {exc}", clean=False)
        self._lost.set()

    # Mechanics

    async def _connection(self) -> asyncio.Transport:
        """Connect, or wait until another task has connected. Raises StreamClosed."""
        if self._connected is not None:
            await self._connected.wait()
        elif self._end is None:
            self._connected = asyncio.Event()
            try:
                await self._connect()
            except asyncio.CancelledError:
                self._connecting = None
                self._abort("cancelled here")
                self._lost.set()
                raise
            finally:
                self._connected.set()
        if self._transport is None:
            raise self._closed()
        return self._transport

    async def _connect(self) -> None:
        host, _, port = self.peer.rpartition(":")
        try:
            async with asyncio.timeout(self._connect_timeout_s) as self._connecting:
                await self._loop.create_connection(
                    lambda: self, host.strip("[]"), int(port), ssl=self._tls
                )
        # OSError includes TimeoutError and errors of TLS. UnicodeError: the host name is invalid.
        except (OSError, UnicodeError) as error:
            self._connecting = None
            why = str(error) or f"no answer within {self._connect_timeout_s:g} s"
            self._stop(f"cannot connect to {self.peer}: {why}", clean=False)
            self._lost.set()  # uvloop may drop the connection without `connection_lost`
        else:
            self._connecting = None

    def _whole_bytes(self, view: memoryview) -> int:
        """Return the number of bytes of `view` that are whole frames.

        An oversized frame ends the stream.
        """
        at, gathered = 0, len(view)
        total_at: Callable[..., tuple[int]] = _TOTAL.unpack_from
        while gathered - at >= _TOTAL.size:
            size = _TOTAL.size + total_at(view, at)[0]
            if size > FRAME_LIMIT_BYTES:
                self._abort(str(FrameTooLarge(size, FRAME_LIMIT_BYTES)))
                return gathered
            if at + size > gathered:
                self._partial_wanted = size
                return at
            at += size
        self._partial_wanted = _TOTAL.size
        return at

    def _stop(self, reason: str, *, clean: bool) -> None:
        """Stop sending and receiving. Only the first call has an effect."""
        if self._end is not None:
            return
        self._end = reason, clean
        self._partial = bytearray()
        if self._connecting is not None and not self._connecting.expired():
            self._connecting.reschedule(self._loop.time())
        wake(self._receiver)
        wake(self._sender)

    def _abort(self, reason: str) -> None:
        """Reset the connection at once. Frames in flight may be lost."""
        self._stop(reason, clean=False)
        if self._transport is not None:
            with suppress(*HANDLE_ERRORS):
                self._transport.abort()

    def _closed(self) -> StreamClosed:
        reason, clean = self._end or ("not connected", False)
        return StreamClosed(reason, clean=clean)

    def _resume_reading(self) -> None:
        self._reading_paused = False
        if self._transport is not None and self._end is None:
            with suppress(*HANDLE_ERRORS):
                self._transport.resume_reading()

    async def _wait_writable(self) -> None:
        while self._writing_paused and self._end is None:
            self._sender = self._loop.create_future()
            try:
                await self._sender
            except asyncio.CancelledError:
                self._abort("cancelled here")
                raise
            finally:
                self._sender = None
        if self._end is not None:
            raise self._closed()
