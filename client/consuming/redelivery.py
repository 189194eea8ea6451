"""Negatively acknowledged and unacknowledged entries, which the client requests after a delay."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import ceil
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from magnetar.client.ids import Key
    from magnetar.client.policies import RedeliveryBackoff

REDELIVERY_TICK_S: Final = 0.1
"""Seconds. The client requests entries that are due within half of this time together with the
first one. Delays are seconds or minutes, so the difference does not matter. A thousand single
negative acknowledgements need only a few commands."""

REDELIVERIES_MAX: Final = 1_000_000
"""Entries that wait, about 200 bytes each. Beyond this limit, the first ones are due at once."""

REDELIVERY_IDS_MAX: Final = 10_000
"""Entries in one command. At up to 24 bytes each, they fit into a command's limit of 256 KiB."""

STALE_TIMES_MAX: Final = 1000
"""The heap also holds due times of discarded entries: at most the number of waiting entries plus
this number."""


class Redeliveries:
    """A machine: entries in, due entries out.

    1. Every entry that was added is still waiting, was discarded, or was returned as due.
    2. The heap holds the time of every waiting entry. After `add` it holds at most as many stale
       times as entries, and STALE_TIMES_MAX more.
    """

    def __init__(
        self,
        delay_s: float,
        *,
        backoff: RedeliveryBackoff | None = None,  # None: only `delay_s`
        period_s: float = 0.0,  # entries become due at multiples of this time; 0: at any time
    ) -> None:
        self._delay_s = delay_s
        self._backoff = backoff
        self._period_s = period_s
        self._due_at: dict[Key, float] = {}
        # A heap. The number keeps entries that are due at the same time in their order.
        self._times: list[tuple[float, int, Key]] = []
        self._added = 0

    def add(self, key: Key, now: float, redelivery_count: int = 0) -> None:
        """Request `key` again after the delay. A second call for a key restarts its delay."""
        due_at = now + self._delay_s
        if self._backoff is not None:
            due_at += self._backoff.next(redelivery_count) / 1000
        if self._period_s:
            due_at = ceil(due_at / self._period_s) * self._period_s
        self._due_at[key] = due_at
        self._added += 1
        heappush(self._times, (due_at, self._added, key))
        if len(self._times) > 2 * len(self._due_at) + STALE_TIMES_MAX:
            self._times = [one for one in self._times if self._due_at.get(one[2]) == one[0]]
            heapify(self._times)

    def discard(self, keys: Iterable[Key]) -> None:
        if self._due_at:
            for key in keys:
                self._due_at.pop(key, None)

    def discard_through(self, key: Key) -> None:
        """Discard `key` and all keys before it."""
        for known in [known for known in self._due_at if known <= key]:
            del self._due_at[known]

    def clear(self) -> None:
        self._due_at.clear()
        self._times.clear()

    def due(self, now: float) -> list[Key]:
        """Return and remove the entries that are due."""
        keys: list[Key] = []
        too_many = len(self._due_at) - REDELIVERIES_MAX
        while (due_at := self._first()) is not None:
            if due_at > now + REDELIVERY_TICK_S / 2 and len(keys) >= too_many:
                break
            _, _, key = heappop(self._times)
            del self._due_at[key]
            keys.append(key)
        return keys

    def timer_at(self) -> float | None:
        """Return the time when the first entry is due. None: no entry waits."""
        due_at = self._first()
        if due_at is None:
            return None
        return 0.0 if len(self._due_at) > REDELIVERIES_MAX else due_at

    @property
    def stale_times(self) -> int:
        """Times in the heap that belong to no waiting entry."""
        return len(self._times) - len(self._due_at)

    def check(self) -> None:
        live = {(at, key) for key, at in self._due_at.items()}
        assert live <= {(at, key) for at, _, key in self._times}

    def _first(self) -> float | None:
        """Return the first due time after the stale times in front of it are dropped."""
        times = self._times
        while times:
            due_at, _, key = times[0]
            if self._due_at.get(key) == due_at:
                return due_at
            heappop(times)
        return None
