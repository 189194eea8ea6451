"""Frames between two processes, and the outbox that makes few of them out of many items.

What a message system in Python costs is calls, not bytes. So a sender never sends: it puts items
into an `Outbox`, and one task sends everything pending as one frame, then whatever has gathered
meanwhile. There is no timer: frames are small while a hop is idle and grow by themselves when it is
busy. Every hop goes over a `FrameStream`, so that gRPC, TCP, a pair in one process and a simulated
network can stand for each other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

from magnetar.runtime.errors import StreamClosed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

__all__ = [
    "FRAME_BYTES_MAX",
    "Buffer",
    "FrameStream",
    "Outbox",
    "StreamClosed",
    "is_stream_end",
    "size_of",
]

Buffer = bytes | bytearray | memoryview
"""A memoryview is of bytes (format "B"), so that its length is its size."""

FRAME_BYTES_MAX = 256 << 10
"""An outbox starts the next frame once one has reached this. A gRPC hop carries about 10,000
frames/s whatever their size; at 256 KiB a frame its fixed cost (some 60 microseconds) is below that
of copying its bytes, and a small item waits at most a millisecond or two behind one."""


class FrameStream(Protocol):
    """A two-way, ordered, bounded stream of byte frames: the seam for every hop.

    One task receives and one task sends for the life of the stream; a second one at the same time
    is a bug and is asserted. Cancelling a `send` or a `receive` ends the stream: a deadline acts on
    a request, never on a stream call. A frame is never empty.
    """

    peer: str

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send the concatenation of `parts` as one frame; waits while the peer is behind.

        The parts must not change until this returns. Raises StreamClosed. Returning does not mean
        that the frame has arrived.
        """

    async def receive(self) -> memoryview:
        """The next frame, valid for as long as it is referenced.

        What outlives the frame must be copied out of it: a 1 KB view pins the whole frame. Frames
        that the peer sent before it closed are still given; then raises StreamClosed, every time.
        """

    async def close(self) -> None:
        """End both directions. Idempotent, ends within a second.

        Frames whose `send` has returned still reach a peer that goes on receiving. Here `send` and
        `receive`, also those under way, raise StreamClosed.
        """


class Outbox:
    """Items to send over one stream, packed into frames.

    An item is what one `put` was given; it is never split over frames. Control items go before bulk
    items; each kind keeps its order. `put` never blocks and never refuses: whoever produces bulk
    waits in `wait_room` before it takes on more work, so that the excess over `pending_bytes_max`
    is what a single turn of the loop can put.

    `run` is called once and owns the stream's sending side. When it ends, for whatever reason, what
    is pending is dropped and later puts are too: the stream is over, and its reader learns why.
    """

    def __init__(
        self, send: Callable[[Sequence[Buffer]], Awaitable[None]], *, pending_bytes_max: int
    ) -> None:
        self.pending_bytes = 0  # including the frame that is being sent
        self._send = send
        self._pending_bytes_max = pending_bytes_max
        self._control: deque[tuple[tuple[Buffer, ...], int]] = deque()
        self._full: deque[tuple[list[Buffer], int]] = deque()
        self._open: list[Buffer] = []  # the frame that bulk items are being added to
        self._open_bytes = 0
        self._sleeper: asyncio.Future[None] | None = None  # None: run() is not asleep
        self._moved = asyncio.Event()  # something was sent, or run() ended
        self._ended = False

    def put(self, *parts: Buffer) -> None:
        """Add one bulk item. Its parts must not change any more. Hot: several calls per message."""
        size = 0
        for part in parts:
            size += len(part)
        if self._ended:
            return
        self.pending_bytes += size
        self._open.extend(parts)
        self._open_bytes += size
        if self._open_bytes >= FRAME_BYTES_MAX:
            self._full.append(self._take_open())
        if self._sleeper is not None:
            self._wake()

    def put_control(self, *parts: Buffer) -> None:
        """Add one item that goes before all bulk items."""
        if self._ended:
            return
        size = size_of(parts)
        self.pending_bytes += size
        self._control.append((parts, size))
        if self._sleeper is not None:
            self._wake()

    async def wait_room(self) -> None:
        """Return when fewer than `pending_bytes_max` bytes are pending. Raises StreamClosed."""
        while self.pending_bytes >= self._pending_bytes_max:
            await self._wait_moved()
        if self._ended:
            raise StreamClosed("the outbox has ended", clean=False)

    async def wait_sent(self) -> None:
        """Return when all that was put has been sent, as before a close. Raises StreamClosed."""
        while self.pending_bytes:
            await self._wait_moved()
        if self._ended:
            raise StreamClosed("the outbox has ended", clean=False)

    async def run(self) -> None:
        """Send what is pending, for as long as the stream lives. Returns when it is closed."""
        try:
            while True:
                while not self.pending_bytes:
                    self._sleeper = asyncio.get_running_loop().create_future()
                    await self._sleeper
                frame, size = self._take()
                await self._send(frame)
                self.pending_bytes -= size
                self._moved.set()
        except StreamClosed:
            return
        finally:
            self._end()

    def _take(self) -> tuple[list[Buffer], int]:
        """The next frame: control items first, then bulk as far as a frame goes."""
        if not self._control:
            return self._full.popleft() if self._full else self._take_open()
        frame: list[Buffer] = []
        size = 0
        while self._control and size < FRAME_BYTES_MAX:
            parts, part_bytes = self._control.popleft()
            frame.extend(parts)
            size += part_bytes
        if not self._control and not self._full and size + self._open_bytes <= FRAME_BYTES_MAX:
            bulk, bulk_bytes = self._take_open()
            frame.extend(bulk)
            size += bulk_bytes
        return frame, size

    def _take_open(self) -> tuple[list[Buffer], int]:
        taken = self._open, self._open_bytes
        self._open, self._open_bytes = [], 0
        return taken

    def _wake(self) -> None:
        assert self._sleeper is not None
        if not self._sleeper.done():  # done: run() is being cancelled
            self._sleeper.set_result(None)
        self._sleeper = None

    async def _wait_moved(self) -> None:
        self._moved.clear()
        await self._moved.wait()

    def _end(self) -> None:
        self._ended = True
        self.pending_bytes = 0
        self._control.clear()
        self._full.clear()
        self._open, self._open_bytes = [], 0
        self._moved.set()


def size_of(parts: Sequence[Buffer]) -> int:
    """The bytes of `parts` together."""
    return sum(map(len, parts))


def is_stream_end(error: BaseException) -> bool:
    """Whether `error` is StreamClosed, or a group of nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_stream_end, error.exceptions))
    return isinstance(error, StreamClosed)
