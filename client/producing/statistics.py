"""The statistics of a producer."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

LATENCIES_MAX: Final = 1000
"""The number of receipts whose latencies a producer remembers, for each partition."""


@dataclass(slots=True)
class ProducerStatistics:
    """Counts since the producer was created. `Producer.get_stats` returns a copy."""

    messages_sent: int = 0
    """Messages in entries, and messages that failed before they were put into an entry."""
    entries_sent: int = 0
    """Entries. A batch is one entry. A message in chunks has one entry for each chunk."""
    bytes_sent: int = 0
    """Bytes of these entries, compressed and encrypted, with their metadata."""
    messages_stored: int = 0
    """Messages with a receipt."""
    messages_failed: int = 0
    """Messages that failed."""
    pending_messages: int = 0
    """Messages in entries without an outcome so far. A message in an open batch is not counted."""
    messages_per_second: float = field(default=0.0, compare=False)
    """The average rate of `messages_sent` between the last two computations. A call of `get_stats`
    computes the rates if the last computation was at least a second ago."""
    bytes_per_second: float = field(default=0.0, compare=False)
    """The rate of `bytes_sent` in the same time."""
    latency_ms_mean: float = field(default=0.0, compare=False)
    """The mean latency of the last 1,000 entries of each partition: the time in milliseconds from
    the encoding of an entry to its receipt. 0.0: no receipt so far."""
    latency_ms_50pct: float = field(default=0.0, compare=False)
    """The median of these latencies."""
    latency_ms_95pct: float = field(default=0.0, compare=False)
    """The 95th percentile of these latencies."""
    latency_ms_99pct: float = field(default=0.0, compare=False)
    """The 99th percentile of these latencies."""
    latency_ms_max: float = field(default=0.0, compare=False)
    """The maximum of these latencies."""


class SendCounter:
    """A machine that counts the entries and messages of one publisher."""

    def __init__(self) -> None:
        self.messages_sent = self.entries_sent = self.bytes_sent = 0
        self.messages_stored = self.messages_failed = 0
        self.latencies_s: deque[float] = deque(maxlen=LATENCIES_MAX)

    def on_sent(self, messages: int, size: int) -> None:
        """Count an entry of `size` bytes. `messages` is 0 for each chunk before the last one."""
        self.messages_sent += messages
        self.entries_sent += 1
        self.bytes_sent += size


def statistics_of(counters: Iterable[SendCounter]) -> ProducerStatistics:
    """Return the sums of the publishers of one producer, without rates."""
    total = ProducerStatistics()
    latencies: list[float] = []
    for one in counters:
        total.messages_sent += one.messages_sent
        total.entries_sent += one.entries_sent
        total.bytes_sent += one.bytes_sent
        total.messages_stored += one.messages_stored
        total.messages_failed += one.messages_failed
        latencies += one.latencies_s
    total.pending_messages = total.messages_sent - total.messages_stored - total.messages_failed
    if latencies:
        latencies.sort()
        total.latency_ms_mean = sum(latencies) / len(latencies) * 1000
        total.latency_ms_50pct = _share(latencies, 0.5)
        total.latency_ms_95pct = _share(latencies, 0.95)
        total.latency_ms_99pct = _share(latencies, 0.99)
        total.latency_ms_max = latencies[-1] * 1000
    return total


def _share(ordered_s: list[float], share: float) -> float:
    """Return a percentile in milliseconds. A `share` of 0.95 gives the 95th percentile."""
    return ordered_s[math.ceil(len(ordered_s) * share) - 1] * 1000
