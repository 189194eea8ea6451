"""Pace: an even rate limit. Pure."""

from __future__ import annotations


class Pace:
    """`now` is in seconds of any clock that does not go backwards. Idle time earns no credit,
    because the limit must prevent bursts."""

    def __init__(self, per_s: float) -> None:
        assert per_s > 0, per_s
        self._per_s = per_s
        self._free_at = 0.0

    def delay_s(self, amount: float, now: float) -> float:
        """Take `amount`. Returns the seconds to wait before it may be used."""
        begin = max(self._free_at, now)
        self._free_at = begin + amount / self._per_s
        return begin - now
