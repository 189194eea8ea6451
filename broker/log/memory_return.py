"""When the memory of a burst of publishes goes back to the system. Pure.

A burst that held BURST_BYTES or more is over when less than a quarter of its peak is held. Then the
C library is told once to give back what is free.
"""

from __future__ import annotations

from typing import Final

BURST_BYTES: Final = 32 << 20
"""A smaller burst's memory is kept for the next publishes: to ask the system for it again would
cost more than it saves."""

LOOK_S: Final = 5.0
"""The period in which the broker checks. A check compares two numbers."""


class MemoryReturn:
    def __init__(self) -> None:
        self._peak = 0  # the peak since memory was returned

    def is_due(self, *, peak: int, used: int) -> bool:
        """Whether memory is to be returned now. `peak`: the most that was held since the last call;
        `used`: what is held now, both in bytes."""
        self._peak = max(self._peak, peak, used)
        if self._peak < BURST_BYTES or used > self._peak // 4:
            return False
        self._peak = 0
        return True
