"""The statistics of a producer."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

LATENCIES_MAX: Final = 1000
"""A producer remembers the latencies of this many receipts for each partition."""


@dataclass(slots=True)
class ProducerStatistics:
    """Counts since the producer was created. `Producer.get_stats` returns a copy."""

    messages_sent: int = 0  # handed to the connection or to its queue
    entries_sent: int = 0  # a batch is one entry; a large message has one for each chunk
    bytes_sent: int = 0  # the bytes of these entries, compressed and encrypted, with their metadata
    messages_stored: int = 0  # the messages with a receipt
    messages_failed: int = 0
    pending_messages: int = 0  # sent, without an outcome so far
    # Since the last call of get_stats that was at least a second earlier.
    messages_per_second: float = field(default=0.0, compare=False)
    bytes_per_second: float = field(default=0.0, compare=False)
    # From sending an entry to its receipt, of the last 1,000 entries; 0.0: no receipt so far.
    latency_ms_mean: float = field(default=0.0, compare=False)
    latency_ms_50pct: float = field(default=0.0, compare=False)
    latency_ms_95pct: float = field(default=0.0, compare=False)
    latency_ms_99pct: float = field(default=0.0, compare=False)
    latency_ms_max: float = field(default=0.0, compare=False)


class SendCounter:
    """A machine: counts what one publisher sends."""

    def __init__(self) -> None:
        self.messages_sent = self.entries_sent = self.bytes_sent = 0
        self.messages_stored = self.messages_failed = 0
        self.latencies_s: deque[float] = deque(maxlen=LATENCIES_MAX)

    def on_sent(self, messages: int, size: int) -> None:
        """Count an entry. `messages` 0: a chunk before the last."""
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
    """Return the value in milliseconds that this share of all values does not exceed."""
    return ordered_s[math.ceil(len(ordered_s) * share) - 1] * 1000
