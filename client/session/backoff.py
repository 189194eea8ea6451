"""When to try to reach the owner of a topic again: delays that double, with jitter.

The cap is low on purpose. A topic whose broker died is served again within about three seconds, and
a client must notice within one more. A thousand producers on one dead broker ask a thousand times a
second then, spread by the jitter; a lookup costs a broker some 50 microseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random

RETRY_DELAY_S_FIRST: Final = 0.05
RETRY_DELAY_S_MAX: Final = 1.0
# An attachment that held for this long was a success: the next failure begins at the first delay.
# One that breaks sooner counts as one more failure, or a broker that accepts and drops would be
# asked without pause.
HELD_S: Final = 1.0


class ReconnectDelay:
    """A machine: told of successes and failures, it says when to try next.

    1. 0 < delay <= RETRY_DELAY_S_MAX, at least half of what it would be without jitter.
    2. Without a success that held, delays' upper bounds do not shrink.
    """

    def __init__(self, random: random.Random) -> None:
        self._random = random
        self._bound_s = RETRY_DELAY_S_FIRST
        self._attached_at: float | None = None  # None: not attached

    def on_attached(self, now: float) -> None:
        self._attached_at = now

    def on_failed(self, now: float) -> float:
        """An attempt failed, or what was attached is lost. Returns the seconds to wait."""
        if self._attached_at is not None and now - self._attached_at >= HELD_S:
            self._bound_s = RETRY_DELAY_S_FIRST
        self._attached_at = None
        bound_s = self._bound_s
        self._bound_s = min(bound_s * 2, RETRY_DELAY_S_MAX)
        return bound_s * self._random.uniform(0.5, 1.0)

    def check(self) -> None:
        assert self._bound_s >= RETRY_DELAY_S_FIRST
        assert self._bound_s <= RETRY_DELAY_S_MAX
