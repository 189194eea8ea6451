"""Rates of a producer's or consumer's counters, computed only when the program asks for them."""

from __future__ import annotations

from typing import Final

RATE_SPAN_S_MIN: Final = 1.0
"""Rates over a shorter time would be inaccurate."""


class Rates:
    """A machine: counts and times in, averages per second out.

    The averages are computed again when RATE_SPAN_S_MIN has passed since the last computation. They
    cover the time since then.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._messages = self._bytes = 0
        self._rates = (0.0, 0.0)

    def rates(self, messages: int, size: int, now: float) -> tuple[float, float]:
        """Return messages and bytes per second. `messages` and `size` are the counts until now."""
        span = now - self._since
        if span >= RATE_SPAN_S_MIN:
            self._rates = (messages - self._messages) / span, (size - self._bytes) / span
            self._since, self._messages, self._bytes = now, messages, size
        return self._rates
