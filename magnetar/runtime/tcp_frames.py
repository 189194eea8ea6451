"""Frame streams over TCP: the transport of the data plane between brokers and bookies.

A round trip of a small frame costs a third of a round trip over grpc.aio. So frequent calls use
this module, and rare calls use gRPC.

The wire. Every frame begins with a prefix of four bytes, big-endian: the kind in the first byte,
the size of the content in the other three. A data frame has kind 0, so its prefix equals the size.

    0  data      1 to FRAME_LIMIT_BYTES bytes
    1  beat      empty: this end is alive
    2  goodbye   empty: this end has closed, and sends nothing more
    3  broken    1 to 1,024 bytes of UTF-8: this end ended the stream for this reason

Anything else is malformed and ends the stream before memory is allocated for it.

How a stream ends. `close` sends goodbye after the frames that were sent, and shuts down its sending
side. This end then drops the bytes that still arrive, until the peer has closed too. It must not
close the socket earlier. The kernel resets a connection whose socket is closed with unread bytes,
and the reset can destroy the last frames in flight to the peer. After `close_s`, this end resets
the connection in any case. Without goodbye, the end of a stream is unclean.

Half-open connections. Each end sends a beat when it has sent nothing for `beat_s`. It ends the
stream when it has received nothing for `silent_beats` times `beat_s`. A beat needs no answer, so a
peer that reads slowly does not count as dead. An end does not count the peer's silence while it has
paused its own reading, or after a standstill of its own process.

Back-pressure. `send` waits while the transport holds more than WRITE_HIGH_BYTES. The transport
stops reading while more than READ_HIGH_BYTES wait for `receive`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final, cast

from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.frames import is_stream_end, size_of
from magnetar.runtime.listener import authority
from magnetar.runtime.log import get_logger
from magnetar.runtime.supervise import is_bug, is_operating_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from magnetar.runtime.frames import Buffer, FrameStream

log = get_logger(__name__)

FRAME_LIMIT_BYTES: Final = (16 << 20) - 1
"""The largest data frame: the largest size that fits into three bytes. A frame of an outbox has at
most 256 KiB and one more item. The largest item is a stored entry of little more than 5 MiB."""

WRITE_HIGH_BYTES: Final = 256 << 10
"""`send` waits while the transport holds more bytes. The value is the size of one frame of an
outbox. Further items wait in the outbox, where control items can still overtake bulk items."""

READ_HIGH_BYTES: Final = 1 << 20
"""The transport stops reading at this size of waiting frames, and continues below half of it. One
read of the socket (up to 256 KB) and one incomplete frame can exceed the limit."""

JOIN_BYTES: Final = 64 << 10
"""The stream joins the parts of a frame of at most this size into one buffer. It also joins small
parts (at most 4 KiB on average). One copy is cheaper than a system call with many small buffers."""

HANDLE_ERRORS: Final = (OSError, RuntimeError)
"""The errors of a write, a read or a close of a connection that is gone: asyncio raises an OSError,
uvloop a RuntimeError."""

_JOIN_PART_BYTES: Final = 4 << 10

# The memory that Python needs for a waiting frame: its view and its place in the queue.
_FRAME_OVERHEAD_BYTES: Final = 256
_REASON_BYTES_MAX: Final = 1024
_ACCEPT_BACKLOG: Final = 1024  # for brokers that reconnect at the same moment
_PORT_MAX: Final = 65_535
_PREFIX: Final = struct.Struct(">I")
_SIZE_MASK: Final = 0xFFFFFF


class _Kind(IntEnum):
    DATA = 0
    BEAT = 1
    GOODBYE = 2
    BROKEN = 3


_CONTENT_BYTES: Final = {  # the minimum and the maximum
    _Kind.DATA: (1, FRAME_LIMIT_BYTES),
    _Kind.BEAT: (0, 0),
    _Kind.GOODBYE: (0, 0),
    _Kind.BROKEN: (1, _REASON_BYTES_MAX),
}


@dataclass(frozen=True, slots=True)
class TcpTimes:
    """The times that the ends of a stream wait for each other."""

    connect_s: float = 5.0
    close_s: float = 1.0  # the peer's time to take the sent frames and to close too
    # A server ends a new connection from which no whole data frame has arrived after this time.
    first_frame_s: float = 10.0
    # An end notices after 12 to 16 s that its peer has vanished (power cut, partition).
    beat_s: float = 4.0
    silent_beats: int = 3


TIMES: Final = TcpTimes()


class TcpFrameStream(asyncio.Protocol):
    """One end of a connection: a `FrameStream`, and the protocol of its transport.

    `connect_frames` and `FrameServer` create streams.
    """

    def __init__(
        self, times: TcpTimes, on_open: Callable[[TcpFrameStream], None] | None = None
    ) -> None:
        """`on_open` is called when the connection is open. None: this is the client's end."""
        self.peer = "unknown"
        self._times = times
        self._on_open = on_open
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None  # None: not connected yet
        self._end: tuple[str, bool] | None = None  # None: open
        self._lost = asyncio.Event()  # the connection is gone
        self._beat_timer: asyncio.TimerHandle | None = None
        # Ends the wait for the first frame, or a close.
        self._end_timer: asyncio.TimerHandle | None = None
        # Receiving.
        self._frames: deque[memoryview] = deque()
        self._frames_bytes = 0
        self._partial = bytearray()  # the beginning of a prefix or a frame
        self._partial_wanted = 0  # the size of the whole prefix or frame
        self._receiver: asyncio.Future[None] | None = None  # None: no task waits in `receive`
        self._reading_paused = False
        self._heard = False  # True: bytes arrived since the last `_beat`
        self._silent_beats = 0
        # Sending.
        self._sender: asyncio.Future[None] | None = None  # None: no task waits in `send`
        self._writing_paused = False
        self._sent = False  # True: a frame was sent since the last `_beat`

    # -- FrameStream -------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """True when either end has closed the stream, or the stream broke."""
        return self._end is not None

    async def send(self, parts: Sequence[Buffer]) -> None:
        assert self._sender is None, "two tasks send on one stream"
        if self._end is not None:
            raise self._closed()
        size = size_of(parts)
        assert 0 < size <= FRAME_LIMIT_BYTES, f"a frame of {size} bytes"
        transport = self._transport
        assert transport is not None
        self._sent = True
        try:
            write_parts(transport, (_PREFIX.pack(size), *parts))
        except HANDLE_ERRORS as error:
            self._stop(f"connection lost: {error}", clean=False)
            raise self._closed() from error
        if self._writing_paused:
            await self._wait_writable()

    async def receive(self) -> memoryview:
        assert self._receiver is None, "two tasks receive on one stream"
        while not self._frames:
            if self._end is not None:
                raise self._closed()
            self._receiver = self._loop.create_future()
            try:
                await self._receiver
            except asyncio.CancelledError:
                self._on_cancelled()
                raise
            finally:
                self._receiver = None
        frame = self._frames.popleft()
        self._frames_bytes -= len(frame) + _FRAME_OVERHEAD_BYTES
        if self._reading_paused and self._frames_bytes < READ_HIGH_BYTES // 2:
            self._resume_reading()
        return frame

    async def close(self) -> None:
        self.say_goodbye()
        try:
            await self._lost.wait()
        except asyncio.CancelledError:
            self.abort("cancelled here")
            raise

    def say_goodbye(self) -> None:
        """Begin to close the stream. A following `close` waits for the connection's end."""
        self._leave("closed here", clean=True, kind=_Kind.GOODBYE)

    def break_off(self, reason: str) -> None:
        """End the stream uncleanly, and send the reason to the peer after the frames that were
        sent. A following `close` waits for the connection's end."""
        text = reason.encode(errors="replace")[:_REASON_BYTES_MAX] or b"unknown"
        self._leave(reason, clean=False, kind=_Kind.BROKEN, content=text)

    def abort(self, reason: str) -> None:
        """Reset the connection at once. Frames in flight may be lost."""
        self._stop(reason, clean=False)
        self._frames.clear()
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = set_up(transport)
        address = transport.get_extra_info("peername")  # None: the peer is gone already
        if address:
            self.peer = authority(address[0], address[1])
        self._beat_timer = self._loop.call_later(self._times.beat_s, self._beat)
        if self._on_open is not None:
            self._end_timer = self._loop.call_later(
                self._times.first_frame_s, self._on_no_first_frame
            )
            self._on_open(self)

    def data_received(self, data: bytes) -> None:
        if self._end is not None:
            return  # drop the frames of a peer that has not received the goodbye yet
        self._heard = True
        if self._partial:
            self._partial += data
            if len(self._partial) < self._partial_wanted:
                return
            gathered, self._partial = self._partial, bytearray()
            view = memoryview(gathered)
        else:
            view = memoryview(data)
        rest = self._take_frames(view)
        if rest < len(view):
            self._partial += view[rest:]
        if self._frames:
            wake(self._receiver)
            if self._frames_bytes >= READ_HIGH_BYTES and self._transport is not None:
                self._reading_paused = True
                with suppress(*HANDLE_ERRORS):  # `connection_lost` follows
                    self._transport.pause_reading()

    def eof_received(self) -> None:
        """The peer has ended the connection without goodbye. The transport then closes itself."""
        where = "inside a frame" if self._partial else "between frames"
        self._stop(f"the connection ended {where} without goodbye", clean=False)

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        wake(self._sender)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(f"connection lost: {exc}", clean=False)
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._lost.set()

    # -- what arrives ------------------------------------------------------------------------------

    def _take_frames(self, view: memoryview) -> int:
        """Take the whole frames of `view`, without a copy. Returns where the rest begins."""
        at, end = 0, len(view)
        prefix_at = _PREFIX.unpack_from
        while True:
            if end - at < 4:
                self._partial_wanted = 4
                return at
            (word,) = prefix_at(view, at)
            if 0 < word <= FRAME_LIMIT_BYTES:  # kind 0
                begin = at + 4
                if end - begin < word:
                    self._partial_wanted = 4 + word
                    return at
                at = begin + word
                self._frames.append(view[begin:at])
                self._frames_bytes += word + _FRAME_OVERHEAD_BYTES
                if self._on_open is not None and self._end_timer is not None:
                    self._end_timer.cancel()  # the first frame
                    self._end_timer = None
                continue
            kind, size = word >> 24, word & _SIZE_MASK
            least, most = _CONTENT_BYTES.get(cast("_Kind", kind), (1, 0))
            if not least <= size <= most:
                self._on_malformed(kind, size)
                return end
            if end - at - 4 < size:
                self._partial_wanted = 4 + size
                return at
            content = bytes(view[at + 4 : at + 4 + size])
            at += 4 + size
            if kind != _Kind.BEAT:
                self._on_last_words(kind, content)
                return end

    def _on_malformed(self, kind: int, size: int) -> None:
        reason = f"malformed frame: kind {kind} with {size} bytes"
        log.warning("malformed frame received", peer=self.peer, kind=kind, size=size)
        self.break_off(reason)

    def _on_last_words(self, kind: int, content: bytes) -> None:
        """The peer has ended the stream. It drops all frames that still arrive from this end."""
        if kind == _Kind.GOODBYE:
            self._stop("closed by the peer", clean=True)
        else:
            self._stop(content.decode(errors="replace"), clean=False)
        if self._transport is not None:
            self._transport.close()

    # -- beats and deadlines -----------------------------------------------------------------------

    def _beat(self) -> None:
        times, now = self._times, self._loop.time()
        stalled = self._beat_timer is not None and now - self._beat_timer.when() > times.beat_s / 2
        self._beat_timer = self._loop.call_later(times.beat_s, self._beat)
        if self._heard or self._reading_paused or stalled:
            self._silent_beats = 0
        else:
            self._silent_beats += 1
        self._heard = False
        if self._silent_beats >= times.silent_beats:
            silent_s = times.beat_s * times.silent_beats
            log.warning("peer silent", peer=self.peer, silent_s=silent_s)
            self._stop(f"the peer was silent for {silent_s:g} s", clean=False)
            if self._transport is not None:
                self._transport.abort()  # `receive` still returns the frames that have arrived
            return
        if not self._sent and not self._writing_paused and self._transport is not None:
            with suppress(*HANDLE_ERRORS):
                self._transport.write(_PREFIX.pack(_Kind.BEAT << 24))
        self._sent = False

    def _on_no_first_frame(self) -> None:
        self._end_timer = None
        log.warning("connection without a frame", peer=self.peer, after_s=self._times.first_frame_s)
        self.break_off(f"no whole frame within {self._times.first_frame_s:g} s")

    # -- the end -----------------------------------------------------------------------------------

    def _leave(self, reason: str, *, clean: bool, kind: _Kind, content: bytes = b"") -> None:
        """Send the last frame, a goodbye or the reason. The connection ends when the peer has
        closed, or after `close_s`."""
        first = self._end is None
        self._stop(reason, clean=clean)
        self._frames.clear()
        transport = self._transport
        if not first or transport is None or self._lost.is_set():
            return
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._end_timer = self._loop.call_later(self._times.close_s, transport.abort)
        try:
            transport.write(_PREFIX.pack(kind << 24 | len(content)) + content)
            transport.write_eof()
        except HANDLE_ERRORS:  # the peer has reset the connection
            transport.abort()
        self._resume_reading()

    def _stop(self, reason: str, *, clean: bool) -> None:
        """Stop sending and receiving. Only the first call counts."""
        if self._end is not None:
            return
        self._end = reason, clean
        self._partial = bytearray()
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        wake(self._receiver)
        wake(self._sender)

    def _on_cancelled(self) -> None:
        """A `send` or a `receive` was cancelled: break the stream, unless it has ended already. A
        stream that has ended still sends its last frame."""
        if self._end is None:
            self.abort("cancelled here")

    def _closed(self) -> StreamClosed:
        assert self._end is not None
        reason, clean = self._end
        return StreamClosed(reason, clean=clean)

    def _resume_reading(self) -> None:
        if self._reading_paused and self._transport is not None:
            self._reading_paused = False
            self._heard = True  # do not count the pause as silence of the peer
            if not self._lost.is_set():
                with suppress(*HANDLE_ERRORS):
                    self._transport.resume_reading()

    async def _wait_writable(self) -> None:
        while self._writing_paused and self._end is None:
            self._sender = self._loop.create_future()
            try:
                await self._sender
            except asyncio.CancelledError:
                self._on_cancelled()
                raise
            finally:
                self._sender = None
        if self._end is not None:
            raise self._closed()


async def connect_frames(address: str, *, times: TcpTimes = TIMES) -> TcpFrameStream:
    """Connect to "host:port". Returns the client's end of the new stream, which the caller closes.
    Raises StreamClosed. May be cancelled."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and int(port) <= _PORT_MAX):
        raise StreamClosed(f"cannot connect to {address!r}: it is not host:port", clean=False)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(times.connect_s):
            _, stream = await loop.create_connection(
                lambda: TcpFrameStream(times), host.strip("[]"), int(port)
            )
    except OSError as error:  # TimeoutError is one
        why = str(error) or f"no answer within {times.connect_s:g} s"
        raise StreamClosed(f"cannot connect to {address}: {why}", clean=False) from error
    return stream


class FrameServer:
    """Accepts connections, and runs a handler for each.

    When the handler returns, the server closes the stream. The handler need not catch the
    StreamClosed of its stream. If the handler raises an operating error, the peer gets the error's
    text as the reason; after any other error, it gets "internal error". The server also reports a
    bug to the loop's exception handler.
    """

    def __init__(
        self,
        handle: Callable[[FrameStream], Awaitable[None]],
        *,
        connections_max: int,
        times: TcpTimes = TIMES,
    ) -> None:
        """The server refuses connections beyond `connections_max`, and tells the peer so."""
        self._handle = handle
        self._connections_max = connections_max
        self._times = times
        self._group: asyncio.TaskGroup | None = None  # None: not running
        self._streams: set[TcpFrameStream] = set()

    @property
    def connections(self) -> int:
        return len(self._streams)

    async def run(self, listener: socket.socket) -> None:
        """Serve on a listening socket (runtime/listener.py) until cancelled. Then close the socket,
        say goodbye on all streams, and cancel the handlers; this takes at most `close_s`."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            self._group = group
            server = await loop.create_server(
                lambda: TcpFrameStream(self._times, self._on_open),
                sock=listener,
                backlog=_ACCEPT_BACKLOG,
            )
            try:
                await loop.create_future()  # until cancelled; then the group cancels the handlers
            finally:
                self._group = None
                server.close()
                for stream in self._streams:
                    stream.say_goodbye()

    def _on_open(self, stream: TcpFrameStream) -> None:
        if self._group is None:
            stream.abort("the server has ended")
        elif len(self._streams) >= self._connections_max:
            log.warning("connection refused", peer=stream.peer, limit=self._connections_max)
            stream.break_off(f"too many connections, the limit is {self._connections_max}")
        else:
            self._streams.add(stream)
            self._group.create_task(self._serve(stream))

    async def _serve(self, stream: TcpFrameStream) -> None:
        try:
            await self._handle(stream)
        except Exception as error:
            if not (stream.ended and is_stream_end(error)):
                self._fail(stream, error)
        finally:
            try:
                await stream.close()
            finally:
                self._streams.discard(stream)

    @staticmethod
    def _fail(stream: TcpFrameStream, error: Exception) -> None:
        """Log a handler's failure, or report it to the loop if it is a bug. Then end the stream,
        and send the reason to the peer."""
        if is_bug(error):
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a bug in a handler of frames", "exception": error}
            )
            stream.break_off("internal error")
        elif is_operating_error(error):
            log.warning("stream failed", peer=stream.peer, error=repr(error))
            stream.break_off(f"{type(error).__name__}: {error}")
        else:
            log.error("stream failed", peer=stream.peer, exc_info=error)
            stream.break_off("internal error")


def set_up(transport: asyncio.BaseTransport) -> asyncio.Transport:
    """Prepare a new connection for frames: the transport pauses `send` at WRITE_HIGH_BYTES, and the
    kernel sends small writes at once."""
    made = cast("asyncio.Transport", transport)
    made.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


def write_parts(transport: asyncio.WriteTransport, parts: Sequence[Buffer]) -> None:
    """Write the parts, joined into one buffer if this is cheap (JOIN_BYTES). The caller may change
    the parts afterwards."""
    size = size_of(parts)
    if size <= JOIN_BYTES or size <= _JOIN_PART_BYTES * len(parts):
        transport.write(b"".join(parts))
    else:
        transport.writelines([*map(_unchanging, parts)])


def _unchanging(part: Buffer) -> Buffer:
    """Return the part, or a copy if it can change: a transport may keep a part after `send` has
    returned."""
    return part if type(part) is bytes or memoryview(part).readonly else bytes(part)
