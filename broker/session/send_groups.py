"""How many SENDs of a connection are carried out together, as a machine.

Theory of operation. At 1,000 messages per second each SEND arrives alone. To wake the reader for
each of them, to take it through all stages and to put it into the outboxes of three bookies costs
most of the broker's time for it, and the outboxes gather four of them afterwards in any case
(runtime/frames.py). So a connection whose producer sends without waiting for receipts lets its
reader wait until a group of SENDs has arrived, at most GATHER_S_MAX.

A producer that waits for each receipt has nothing outstanding when its next SEND arrives, so
nothing waits for it. SENDs that come more often than every INTERVAL_S_MIN share frames without a
wait, and a wait would keep a sender with a small window from filling it. If they come less often
than every INTERVAL_S_MAX, hardly two of them come in time. The size of a group follows what comes
in time (`GroupSize`).
"""

from __future__ import annotations

from typing import Final

from magnetar.runtime.frames import GROUP_ITEMS_MIN, GroupSize

OUTSTANDING_MIN: Final = 2
"""SENDs of one producer without a receipt, when the next one arrives, from which on more SENDs are
likely to come soon. One alone may be that of a slow producer whose receipt is just under way."""

INTERVAL_S_MIN: Final = 0.0004
INTERVAL_S_MAX: Final = 0.002
"""The mean time between SENDs of a connection for which they are gathered: 500 to 2,500 per second.
At 6,000 per second, with ten in flight, gathering cost an eighth of the rate."""

SMOOTHING: Final = 1 / 8
"""The weight of a frame in the mean."""


class SendGroups:
    """The groups of one connection."""

    def __init__(self) -> None:
        self._group = GroupSize()
        self._sends = 0  # in the frame that is being read
        self._comes_soon = False  # the next SEND
        self._interval_s = 0.0  # the mean time between SENDs
        self._frame_at = 0.0  # the last frame with SENDs, in loop time

    def on_publish(self, sends: int, *, outstanding: int) -> None:
        """A run of SENDs of a producer arrived, when `outstanding` of its SENDs had no receipt."""
        self._sends += sends
        if outstanding >= OUTSTANDING_MIN:
            self._comes_soon = True

    def take_wanted(self, now: float) -> int:
        """A frame was carried out: how many SENDs to gather before the next one. 0: none."""
        sends, self._sends = self._sends, 0
        if not sends:
            return 0
        interval_s = min((now - self._frame_at) / sends, 2 * INTERVAL_S_MAX)  # else: it was idle
        self._interval_s += (interval_s - self._interval_s) * SMOOTHING
        self._frame_at = now
        is_apt = INTERVAL_S_MIN <= self._interval_s <= INTERVAL_S_MAX
        return self._group.items if is_apt and self._comes_soon else 0

    def on_gathered(self, sends: int | None) -> None:
        """The wait has ended with this number of SENDs. None: another command or many bytes ended
        it."""
        if sends is None:
            return
        if sends >= self._group.items:
            self._group.on_full()
        else:
            self._group.on_short(sends)
            self._comes_soon = sends >= GROUP_ITEMS_MIN
