"""The wall clock, which callers pass in. Durations and deadlines use the time of the event loop."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Gives time stamps. They can jump in both directions: never use them for waits or expiry."""

    def now_ms(self) -> int:
        """Return the milliseconds since 1970-01-01 UTC."""


class SystemClock:
    """The clock of this machine."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000
