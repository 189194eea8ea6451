"""Meters: totals and moving rates of messages and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import Final

RATE_WINDOW_S: Final = 10.0
"""An event this long ago counts 1/e of an event that happens now."""

CLIENTS_PER_TURN: Final = 100
"""The most producers or consumers that are described or disconnected in one turn of the loop, at
20 us each."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second."""

    messages: float
    bytes: float


class Meter:
    """Totals, and rates that decay exponentially. `now` is the loop's time in seconds.

    The caller adds whole batches, not single messages. No timer runs: an idle meter costs no CPU.
    """

    __slots__ = ("_at", "_born", "_recent_bytes", "_recent_messages", "bytes", "messages")

    def __init__(self, now: float) -> None:
        self.messages = 0  # the number of messages since the start
        self.bytes = 0
        self._born = now
        self._at = now
        self._recent_messages = 0.0  # decayed until `_at`
        self._recent_bytes = 0.0

    def count(self, messages: int, size: int, now: float) -> None:
        self.messages += messages
        self.bytes += size
        decay = exp((self._at - now) / RATE_WINDOW_S)
        self._at = now
        self._recent_messages = self._recent_messages * decay + messages
        self._recent_bytes = self._recent_bytes * decay + size

    def rates(self, now: float) -> Rates:
        """The rates now. The rates of a steady flow are correct from the meter's first second
        on."""
        decay = exp((self._at - now) / RATE_WINDOW_S)
        age_s = max(now - self._born, 1.0)
        weight_s = RATE_WINDOW_S * (1.0 - exp(-age_s / RATE_WINDOW_S))
        return Rates(
            self._recent_messages * decay / weight_s, self._recent_bytes * decay / weight_s
        )

    def describe(self, direction: str, now: float) -> dict[str, float]:
        """The rates and counts under Pulsar's names; `direction` is In or Out."""
        rates = self.rates(now)
        return {
            f"msgRate{direction}": rates.messages,
            f"msgThroughput{direction}": rates.bytes,
            f"msg{direction}Counter": self.messages,
            f"bytes{direction}Counter": self.bytes,
        }
