"""Decides when the broker returns the memory of a burst of publishes to the system. Pure.

A burst that held BURST_BYTES or more is over when at most a quarter of its peak is held. Then the
broker tells the C library once to return its free memory.
"""

from __future__ import annotations

from typing import Final

BURST_BYTES: Final = 32 << 20
"""The process keeps the memory of a smaller burst for the next publishes. To return it and request
it again would cost more than it saves."""

LOOK_S: Final = 5.0
"""The interval in seconds between two calls of `is_due`. A call compares two numbers."""


class MemoryReturn:
    def __init__(self) -> None:
        self._peak = 0  # the peak since memory was returned

    def is_due(self, *, peak: int, used: int) -> bool:
        """Decide whether the broker returns memory now. `peak`: the maximum that was held since the
        last call; `used`: the memory that is held now, both in bytes."""
        self._peak = max(self._peak, peak, used)
        if self._peak < BURST_BYTES or used > self._peak // 4:
            return False
        self._peak = 0
        return True
