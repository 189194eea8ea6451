"""Frames between two processes, and the outbox that packs many items into few frames.

In Python the cost of a message system is in the calls, not in the bytes. So a sender puts items
into an `Outbox`. One task sends the pending items as one frame, then the items that were put in the
meantime. A hop is a connection between two processes. Frames are small while the hop is idle, and
larger while it is busy. Every hop uses a `FrameStream`. So gRPC, TCP, an in-process pair of streams
and a simulated network can replace each other.
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
    "HOLD_S_MAX",
    "Buffer",
    "FrameStream",
    "Outbox",
    "StreamClosed",
    "is_stream_end",
    "size_of",
]

Buffer = bytes | bytearray | memoryview
"""A memoryview must have the format "B" (bytes), so that its length is its size."""

FRAME_BYTES_MAX = 256 << 10
"""An outbox starts the next frame when a frame has reached this size. A gRPC hop carries about
10,000 frames/s of any size. At 256 KiB a frame's fixed cost (some 60 microseconds) is below the
cost of copying its bytes, and a small item waits behind a frame for two milliseconds at most."""


HOLD_S_MAX = 0.005
"""The longest time for which an outbox holds items until the peer answers. An answer takes about a
millisecond; the limit is for a peer that answers late or never."""

GATHER_S_MAX = 0.005
"""The longest time after the previous frame for which an outbox gathers a group of items. At 1,000
items a second a frame then carries four items. The two processes spend a third less processor
time on each item."""

GROUP_ITEMS_MIN = 2
"""The size of the first group and of the smallest group."""

GROUP_ITEMS_MAX = 4
"""The size of the largest group. A group of six saves hardly more processor time than a group of
four, and delays each item by a millisecond more."""

GROWTH_PAUSE_MAX = 256
"""After at most this many groups an outbox tries a larger group again."""

CONTROL_BYTES = 100
"""The memory that a control item takes in addition to its bytes. The pending bytes include this
memory: a million answers of 13 bytes take more than 13 MB."""


class FrameStream(Protocol):
    """A two-way, ordered, bounded stream of byte frames: the interface of every hop.

    One task receives and one task sends for the life of the stream. If a second task sends or
    receives, an assertion fails. Cancelling a `send` or a `receive` ends the stream, so set
    deadlines on requests, not on stream calls. A frame is never empty.
    """

    peer: str

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send the concatenation of `parts` as one frame. Waits while the peer reads too slowly.

        The caller must not change the parts before the call returns. When the call returns, the
        frame may not have arrived yet. Raises StreamClosed.
        """

    async def receive(self) -> memoryview:
        """Return the next frame, which stays valid for as long as it is referenced.

        Copy the parts that must outlive the frame: a view of 1 KB keeps the whole frame in memory.
        After the peer has closed the stream, the calls still return the frames that the peer sent
        before. Then every call raises StreamClosed.
        """

    async def close(self) -> None:
        """End both directions. Idempotent; returns within a second.

        A peer that continues to receive gets all frames whose `send` has returned. At this end,
        `send` and `receive` raise StreamClosed, also when they are already waiting.
        """


class Outbox:
    """Items to send over one stream, packed into frames.

    One `put` makes one item, which is never split over frames. Control items go before bulk items;
    each kind keeps its order. `put` never blocks and never refuses. A producer of bulk items awaits
    `wait_room` before it accepts more work, so the pending bytes exceed `pending_bytes_max` by at
    most the bytes that are put in one turn of the loop.

    With `hold_bytes`, the outbox holds bulk items until the peer answers the previous frame, as in
    Nagle's algorithm, and at most for HOLD_S_MAX. It stops holding them when `hold_bytes` or more
    are pending. Items that arrive one after the other then share a frame, and the peer needs one
    sync and one answer for them.

    After the answer, the outbox may also gather a group of items (`GroupSize`), until GATHER_S_MAX
    after the previous frame. It begins to gather when a sender puts an item before the answer and
    does not wait for the outcome of its earlier items. The next item of such a sender will probably
    come soon. For a sender that waits for each outcome (`alone`), the outbox does not begin to
    gather. It stops gathering groups when a wait brings no second item. It holds no control item,
    and no item of `hold_bytes` or more; such an item also releases the held items.

    Call `run` once: it owns the sending side of the stream. `run` ends when the stream has ended.
    Then the outbox drops all pending and later items. The task that receives from the stream gets
    the reason.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Buffer]], Awaitable[None]],
        *,
        pending_bytes_max: int,
        hold_bytes: int = 0,
    ) -> None:
        self.pending_bytes = 0  # including the frame that is being sent
        self._send = send
        self._pending_bytes_max = pending_bytes_max
        self._hold_bytes = hold_bytes
        self._release: asyncio.TimerHandle | None = None  # ends the hold; None: nothing is held
        self._answered = False  # True: the previous frame was answered; a group is being gathered
        self._group = GroupSize()
        self._comes_soon = False  # True: a sender puts items without waiting for their outcomes
        self._sent_s = 0.0  # when the previous frame was sent, in loop time
        self._control: deque[tuple[tuple[Buffer, ...], int]] = deque()
        self._full: deque[tuple[list[Buffer], int]] = deque()
        self._open: list[Buffer] = []  # the frame that bulk items are being added to
        self._open_bytes = 0
        self._open_items = 0
        self._sleeper: asyncio.Future[None] | None = None  # None: run() is not asleep
        self._moved = asyncio.Event()  # a frame was sent, or run() ended
        self._ended = False

    def put(self, *parts: Buffer, items: int = 1, alone: bool = False) -> None:
        """Add one bulk item, or several items that stay in one frame. The caller must not change
        the parts afterwards. `alone`: the sender knows the outcome of all its earlier items, so it
        may wait for each outcome. This is a hot path, with several calls a message."""
        size = 0
        for part in parts:
            size += len(part)
        if self._ended:
            return
        self.pending_bytes += size
        self._open.extend(parts)
        self._open_bytes += size
        self._open_items += items
        if self._open_bytes >= FRAME_BYTES_MAX:
            self._full.append(self._take_open())
        if self._release is not None:
            if not self._answered:
                self._comes_soon = self._comes_soon or not alone
            elif self._open_items >= self._group.items:
                self._release.cancel()
                self._release = None
                self._group.on_full()
        if self._sleeper is not None and not self._is_held:
            self._wake()

    def put_control(self, *parts: Buffer) -> None:
        """Add one item that goes before all bulk items."""
        if self._ended:
            return
        size = size_of(parts) + CONTROL_BYTES
        self.pending_bytes += size
        self._control.append((parts, size))
        if self._sleeper is not None:
            self._wake()

    def on_answer(self) -> None:
        """The peer has answered a frame: stop holding items, except for an unfinished group."""
        if self._release is None or self._answered:
            return
        self._release.cancel()
        self._release = None
        if self._comes_soon:
            self._gather()
        if self._sleeper is not None and self.pending_bytes and not self._is_held:
            self._wake()

    def _gather(self) -> None:
        """Wait for the rest of a group, until GATHER_S_MAX after the previous frame."""
        if self._open_items >= self._group.items:
            self._group.on_full()
            return
        loop, until_s = asyncio.get_running_loop(), self._sent_s + GATHER_S_MAX
        if loop.time() < until_s:
            self._answered = True
            self._release = loop.call_at(until_s, self._end_hold)

    def _end_hold(self) -> None:
        """End a hold at its time limit: the answer or the rest of the group has not come."""
        self._release = None
        if self._answered:
            self._comes_soon = self._open_items >= GROUP_ITEMS_MIN
            self._group.on_short(self._open_items)
        if self._sleeper is not None and self.pending_bytes:
            self._wake()

    async def wait_room(self) -> None:
        """Return when fewer than `pending_bytes_max` bytes are pending. Raises StreamClosed."""
        while self.pending_bytes >= self._pending_bytes_max:
            await self._wait_moved()
        if self._ended:
            raise StreamClosed("the outbox has ended", clean=False)

    async def wait_sent(self) -> None:
        """Return when every item has been sent. Await this call before you close the stream. Raises
        StreamClosed."""
        while self.pending_bytes:
            await self._wait_moved()
        if self._ended:
            raise StreamClosed("the outbox has ended", clean=False)

    async def run(self) -> None:
        """Send pending items until the stream is closed, then return."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                while not self.pending_bytes or self._is_held:
                    self._sleeper = loop.create_future()
                    await self._sleeper
                frame, size = self._take()
                if self._hold_bytes:
                    self._begin_hold(loop)
                await self._send(frame)
                self.pending_bytes -= size
                self._moved.set()
        except StreamClosed:
            return
        finally:
            self._end()

    @property
    def _is_held(self) -> bool:
        return (
            self._release is not None
            and self._open_bytes < self._hold_bytes
            and not self._full
            and not self._control
            and (not self._answered or self._open_items < self._group.items)
        )

    def _begin_hold(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin a hold: a frame is being sent, and the next frame waits for the answer to it."""
        if self._release is not None:
            if not self._answered:
                return  # the answer to the frame before this one has not come yet
            self._release.cancel()
        self._answered = False
        self._sent_s = loop.time()
        self._release = loop.call_at(self._sent_s + HOLD_S_MAX, self._end_hold)

    def _take(self) -> tuple[list[Buffer], int]:
        """Take the next frame: control items first, then bulk up to FRAME_BYTES_MAX."""
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
        self._open, self._open_bytes, self._open_items = [], 0, 0
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
        if self._release is not None:
            self._release.cancel()
            self._release = None
        self.pending_bytes = 0
        self._control.clear()
        self._full.clear()
        self._open, self._open_bytes = [], 0
        self._moved.set()


class GroupSize:
    """The number of items that an outbox gathers for a frame, at most GROUP_ITEMS_MAX.

    After a full group, the next group is larger by one item. When a wait brings a smaller group,
    the next group has this smaller size, and at least GROUP_ITEMS_MIN items. Growth then pauses,
    for twice as many groups as at the previous pause. When a larger group was full, the next pause
    is one group again. For example, with three senders that each wait for their answers, a fourth
    item cannot come. The outbox then waits for a fourth item only once in GROWTH_PAUSE_MAX groups.
    """

    def __init__(self) -> None:
        self.items = GROUP_ITEMS_MIN
        self._has_grown = False  # True: `items` has grown, and no group of this size was full yet
        self._pause = 1  # growth pauses for this many groups after the next short group
        self._pause_left = 0  # growth continues after this many groups

    def on_full(self) -> None:
        if self._has_grown:
            self._has_grown = False
            self._pause = 1
        if self._pause_left:
            self._pause_left -= 1
        elif self.items < GROUP_ITEMS_MAX:
            self.items += 1
            self._has_grown = True

    def on_short(self, items: int) -> None:
        self.items = max(items, GROUP_ITEMS_MIN)
        self._has_grown = False
        self._pause_left = self._pause
        self._pause = min(2 * self._pause, GROWTH_PAUSE_MAX)


def size_of(parts: Sequence[Buffer]) -> int:
    """Return the size of all `parts` together, in bytes."""
    return sum(map(len, parts))


def is_stream_end(error: BaseException) -> bool:
    """Return whether `error` is StreamClosed, or an exception group with only StreamClosed."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_stream_end, error.exceptions))
    return isinstance(error, StreamClosed)
