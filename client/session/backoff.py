"""The delays before a producer or consumer attaches again: they double, with jitter.

The maximum is low on purpose. Another broker serves a dead broker's topics within about three
seconds, and a client must notice within one second more. With the maximum delay, a thousand
producers of a dead broker send up to about 1,300 lookups a second, spread by the jitter. A lookup
costs a broker about 50 microseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random

RETRY_DELAY_S_FIRST: Final = 0.05
RETRY_DELAY_S_MAX: Final = 1.0
# An attachment that lasted this long was a success: after it, the delays begin again with
# RETRY_DELAY_S_FIRST. A shorter attachment counts as a failure. Otherwise the delays would not grow
# at a broker that accepts sessions and soon drops them.
HELD_S: Final = 1.0


class ReconnectDelay:
    """A machine that computes the delays from successes and failures.

    1. 0 < delay <= RETRY_DELAY_S_MAX, and delay is at least half of the delay without jitter.
    2. Without an attachment that lasted HELD_S, the upper bound of the delay does not decrease.
    """

    def __init__(self, random: random.Random) -> None:
        self._random = random
        self._bound_s = RETRY_DELAY_S_FIRST
        self._attached_at: float | None = None  # None: not attached

    def on_attached(self, now: float) -> None:
        self._attached_at = now

    def on_failed(self, now: float) -> float:
        """Note a failed attempt or a lost attachment. Returns the seconds to wait."""
        if self._attached_at is not None and now - self._attached_at >= HELD_S:
            self._bound_s = RETRY_DELAY_S_FIRST
        self._attached_at = None
        bound_s = self._bound_s
        self._bound_s = min(bound_s * 2, RETRY_DELAY_S_MAX)
        return bound_s * self._random.uniform(0.5, 1.0)

    def check(self) -> None:
        assert self._bound_s >= RETRY_DELAY_S_FIRST
        assert self._bound_s <= RETRY_DELAY_S_MAX
