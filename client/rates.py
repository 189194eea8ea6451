"""Rates of a producer's or consumer's counters, computed only when the program asks for them."""

from __future__ import annotations

from typing import Final

RATE_SPAN_S_MIN: Final = 1.0
"""The minimum time in seconds that a rate covers. Over a shorter time it would be inaccurate."""


class Rates:
    """A machine that computes averages per second from counts and times.

    `rates` computes new averages if RATE_SPAN_S_MIN has passed since the last computation. They
    cover the time since that computation.
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
