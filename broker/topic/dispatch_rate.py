"""The dispatch rate of a topic or subscription: buckets of tokens for messages and for bytes. Pure.

A bucket holds at most the tokens of one period, and is full at first. A read takes a token for each
message and each byte. It may leave a bucket below zero, because a batch may exceed the tokens that
are left; the next read then waits longer. So the average is exact. A read waits until each bucket
has the tokens of REFILL_S seconds (at least one), so that a read at a high rate returns more than
one entry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.metadata.policies import Rate

REFILL_S: Final = 0.1

WAIT_S_MIN: Final = 0.001
"""The shortest wait. Without it, rounding errors of a fraction of a token could leave a wait of
almost 0 s again and again."""

_NO_LIMIT: Final = 1 << 62


class _Bucket:
    __slots__ = ("_at", "_capacity", "_per_s", "_tokens")

    def __init__(self, capacity: int, period_s: int, now: float) -> None:
        self._capacity = float(capacity)
        self._per_s = capacity / period_s
        self._tokens = self._capacity
        self._at = now

    def tokens(self, now: float) -> float:
        gained = max(now - self._at, 0.0) * self._per_s
        self._tokens = min(self._capacity, self._tokens + gained)
        self._at = max(now, self._at)
        return self._tokens

    def wait_s(self, now: float) -> float:
        wanted = min(self._capacity, max(1.0, self._per_s * REFILL_S))
        missing = wanted - self.tokens(now)
        return max(missing / self._per_s, WAIT_S_MIN) if missing > 1e-6 else 0.0

    def take(self, count: int, now: float) -> None:
        self._tokens = self.tokens(now) - count


class DispatchRate:
    """The rate of one topic or subscription. `what`: "topic" or "subscription", for texts."""

    __slots__ = ("_bytes", "_messages", "_rate", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._rate: Rate | None = None  # None: no limit
        self._messages: _Bucket | None = None
        self._bytes: _Bucket | None = None

    def set(self, rate: Rate, now: float) -> None:
        """Use this rate from now on. A changed rate begins with full buckets."""
        new = rate if rate.messages_max or rate.bytes_max else None
        if new == self._rate:
            return
        self._rate = new
        self._messages = self._bytes = None
        if rate.messages_max:
            self._messages = _Bucket(rate.messages_max, rate.period_s, now)
        if rate.bytes_max:
            self._bytes = _Bucket(rate.bytes_max, rate.period_s, now)

    @property
    def limited(self) -> bool:
        return self._rate is not None

    def wait_s(self, now: float) -> float:
        """The time that the next read must wait. 0: it may begin now."""
        return max(
            0.0 if self._messages is None else self._messages.wait_s(now),
            0.0 if self._bytes is None else self._bytes.wait_s(now),
        )

    def room(self, now: float) -> tuple[int, int]:
        """The numbers of messages and bytes that may be read now: at least one of each."""
        return (
            _NO_LIMIT if self._messages is None else max(1, int(self._messages.tokens(now))),
            _NO_LIMIT if self._bytes is None else max(1, int(self._bytes.tokens(now))),
        )

    def take(self, messages: int, size: int, now: float) -> None:
        """Count the messages and bytes that were read."""
        if self._messages is not None:
            self._messages.take(messages, now)
        if self._bytes is not None:
            self._bytes.take(size, now)

    def __str__(self) -> str:
        if self._rate is None:
            return f"the {self._what} has no dispatch rate"
        limits = [
            f"{limit} {unit}"
            for limit, unit in (
                (self._rate.messages_max, "messages"),
                (self._rate.bytes_max, "bytes"),
            )
            if limit
        ]
        return f"the {self._what} may dispatch {' and '.join(limits)} in {self._rate.period_s} s"


def longest_wait(rates: Sequence[DispatchRate], now: float) -> tuple[float, DispatchRate | None]:
    """The time in seconds that a read must wait for all rates, and the rate with the longest wait.
    0.0 and None: the read need not wait."""
    wait_s, slowest = 0.0, None
    for rate in rates:
        if rate.limited and rate.wait_s(now) > wait_s:
            wait_s, slowest = rate.wait_s(now), rate
    return wait_s, slowest
