"""PublishBudget: the bytes that one broker may hold for producers, over all topics.

The budget counts the bytes of an entry from the moment when a log takes it until it is confirmed.
It also counts:

- the bytes that the process keeps longer for a slow bookie (`kept`);
- publishes that wait before a log takes them (`hold`);
- entries that are read ahead for consumers (`hold_ahead`).

After each frame with SENDs, a connection asks for a turn, and reads no further frame before its
turn. While the budget is exhausted or other connections wait, the connection waits in a queue. This
bounds the memory.

At `bytes_max` no connection gets a turn. When less than half of the budget is used, connections get
turns again, until the budget is exhausted. They get turns in FIFO order, one in each iteration of
the event loop. So a thousand waiting connections do not read a thousand frames at once.

Work that frees the budget does not wait for the budget: confirmations come from bookies, and a
topic that closes releases its bytes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

PUBLISH_BYTES_MAX: Final = 256 << 20
"""The default of `max_message_publish_buffer_size_in_mb`: two seconds of 128 MB/s."""

LOOK_S: Final = 0.05
"""The interval in seconds at which the budget calls `kept` while connections wait. The result of
`kept` can fall without a call to the budget."""

AHEAD_SHARE: Final = 8
"""Entries of backlogs that are read ahead may take 1/8 of the budget: 32 MiB of 256, six reads of
5 MB."""

HELD_SHARE: Final = 8
"""While producers over their topic's publish rate together hold less than 1/8 of the budget, their
connections read on. Of 256 MiB, 128 producers may hold 256 KB each. Beyond the share, each such
producer holds only the frame that its connection was reading. Publishes can wait long for a rate,
and the producers of other topics need the budget."""

HELD_MAX_SHARE: Final = 4
"""Producers over their topic's publish rate may hold at most 1/4 of the budget. Beyond the share,
their publishes pass at once, and their connections wait for the rate instead. The share is less
than 1/2: connections get turns again only while less than half of the budget is used."""

Turn = asyncio.Future[None]


class PublishBudget:
    def __init__(
        self, bytes_max: int = PUBLISH_BYTES_MAX, *, kept: Callable[[int], int] | None = None
    ) -> None:
        """`kept` is called with the bytes that the logs hold. It returns these bytes plus the bytes
        that the process keeps longer for slow bookies."""
        self.bytes_max = bytes_max
        self.accepted = 0  # bytes that logs accepted and that are not confirmed
        self.held = 0  # bytes that wait for a rate or for the outcome of another publish
        self.ahead = 0  # bytes of backlogs that were read ahead of their dispatch
        self.peak = 0  # about the maximum of `used` since the last `take_peak`
        self._all = kept
        self._queue: dict[Turn, None] = {}
        # True: waiting connections get turns. Set when less than half of the budget is used.
        # Cleared when the budget is exhausted, or no connection waits.
        self._resuming = False
        self._soon = False  # `_give` runs in the next iteration of the loop
        self._timer: asyncio.TimerHandle | None = None  # calls `_give`; None: no timer is set

    @property
    def used(self) -> int:
        logs = self.accepted if self._all is None else self._all(self.accepted)
        return logs + self.held + self.ahead

    @property
    def waiting(self) -> int:
        """The number of connections that wait for their turn."""
        return len(self._queue)

    def change(self, size: int) -> None:
        """A log holds `size` more bytes; a negative `size`: fewer bytes."""
        self.accepted += size
        if size < 0:
            if self._queue and self.accepted < self.bytes_max // 2:
                self._hurry()
        elif self.accepted > self.peak:
            self.peak = self.accepted

    def take_peak(self) -> int:
        """Return about the maximum of `used` since the last call. Growth of `ahead` or of the
        result of `kept` between two calls is not counted."""
        peak, self.peak = self.peak, self.used
        return peak

    def hold(self, size: int) -> None:
        """Producers hold `size` more bytes that no log has taken yet; a negative `size`: fewer
        bytes."""
        self.held += size
        self.peak = max(self.peak, self.accepted + self.held)
        if size < 0 and self._queue and self.used < self.bytes_max // 2:
            self._hurry()

    @property
    def may_gather(self) -> bool:
        """True when the connection of a producer over its topic's rate may read on."""
        return self.held < self.bytes_max // HELD_SHARE

    @property
    def may_hold(self) -> bool:
        """True when one more publish may wait in memory for the rate of its topic."""
        return self.held < self.bytes_max // HELD_MAX_SHARE

    def may_read_ahead(self, size: int) -> bool:
        """Return whether `size` bytes of a backlog may be read ahead. A read-ahead leaves half of
        the budget to producers."""
        within = self.ahead + size <= self.bytes_max // AHEAD_SHARE
        return within and self.used + size <= self.bytes_max // 2

    def hold_ahead(self, size: int) -> None:
        """A read-ahead holds or will hold `size` more bytes; a negative `size`: fewer bytes."""
        self.ahead += size

    def turn(self) -> Turn | None:
        """Join the queue. Returns a future that is done at the connection's turn. The caller must
        then call `leave`. None: the connection need not wait, and is not in the queue."""
        if not self._queue and self.used < self.bytes_max:
            return None
        loop = asyncio.get_running_loop()
        turn: Turn = loop.create_future()
        self._queue[turn] = None
        if self._timer is None and not self._soon:
            self._timer = loop.call_later(LOOK_S, self._give)
        return turn

    def leave(self, turn: Turn) -> None:
        """Leave the queue: the connection has had its turn, or no longer waits. Idempotent."""
        self._queue.pop(turn, None)
        if not turn.done():
            turn.set_result(None)

    def _hurry(self) -> None:
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._give)

    def _give(self) -> None:
        """Update `_resuming`. If it is True, give the first connection of the queue its turn.
        Schedule the next call while connections wait."""
        self._soon = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._queue:
            self._resuming = False
            return
        used = self.used
        self._resuming = used < (self.bytes_max if self._resuming else self.bytes_max // 2)
        if self._resuming:
            self.leave(next(iter(self._queue)))
            self._hurry()
        else:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._give)

    def check(self) -> None:
        assert self.accepted >= 0, "more was confirmed than taken"
        assert self.held >= 0, "more was released than held"
        assert 0 <= self.ahead <= self.bytes_max // AHEAD_SHARE, "too much is read ahead"
        assert not self._queue or self._soon or self._timer is not None, "a wait without an end"
