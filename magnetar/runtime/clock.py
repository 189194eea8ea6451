"""The wall clock as a thing that is passed in. Durations and deadlines use the loop's time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Gives time stamps. They may jump either way, so nothing may wait or expire by them."""

    def now_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000
