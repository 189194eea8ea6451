"""Negatively acknowledged and unacknowledged entries, which the client requests after a delay."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import ceil
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from magnetar.client.ids import Key
    from magnetar.client.policies import RedeliveryBackoff

    _Time = tuple[float, int, Key]  # when the entry is due, the number of its `add`, the entry

REDELIVERY_TICK_S: Final = 0.1
"""Seconds. When an entry is due, the client also requests the entries that are due within half of
this time. Typical delays are seconds or minutes, so the difference does not matter. A thousand
single negative acknowledgements need only a few commands."""

REDELIVERIES_MAX: Final = 1_000_000
"""Entries that wait, about 200 bytes each. Beyond this limit, the first ones are due at once."""

REDELIVERY_IDS_MAX: Final = 10_000
"""Entries in one command. At up to 24 bytes each, they fit into a command's limit of 256 KiB."""

DUE_AT_ONCE_MAX: Final = REDELIVERY_IDS_MAX
"""Entries that one call of `due` returns: some 35 ms with the command for them. The next call
returns the rest."""

STALE_TIMES_MAX: Final = 1000
"""The heap of due times also holds stale times: of discarded entries, and of entries that were
added again with another time. Their limit is the number of waiting entries plus this number. The
keys in the heap of keys exceed the number of waiting entries by at most the same limit."""


class Redeliveries:
    """A machine: entries in, due entries out.

    1. Every entry that was added is still waiting, was discarded, or was returned as due.
    2. The heap holds the time of every waiting entry. The number of stale times in it exceeds the
       number of waiting entries by at most STALE_TIMES_MAX.
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
        # A heap. The number keeps entries with the same due time in the order of their `add` calls.
        self._times: list[_Time] = []
        # The item of each waiting entry in the heap. All other items are stale.
        self._waiting: dict[Key, _Time] = {}
        # A heap of the waiting entries and of some others, for `discard_through`. None: no call of
        # `discard_through` since the last `clear`.
        self._keys: list[Key] | None = None
        self._added = 0

    def add(self, key: Key, now: float, redelivery_count: int = 0) -> None:
        """Request `key` again after the delay. A second call for a key restarts its delay."""
        due_at = now + self._delay_s
        if self._backoff is not None:
            due_at += self._backoff.next(redelivery_count) / 1000
        if self._period_s:
            due_at = ceil(due_at / self._period_s) * self._period_s
        self._added += 1
        time = (due_at, self._added, key)
        if self._keys is not None and key not in self._waiting:
            heappush(self._keys, key)
        self._waiting[key] = time
        heappush(self._times, time)
        self._maybe_compact()

    def discard(self, keys: Iterable[Key]) -> None:
        if self._waiting:
            for key in keys:
                self._waiting.pop(key, None)
            self._maybe_compact()

    def discard_through(self, key: Key) -> None:
        """Discard `key` and all keys before it.

        The first call since `clear` visits all waiting entries. Later calls cost logarithmic time
        for each discarded key.
        """
        if self._keys is None:
            self._keys = list(self._waiting)
            heapify(self._keys)
        while self._keys and self._keys[0] <= key:
            self._waiting.pop(heappop(self._keys), None)
        self._maybe_compact()

    def clear(self) -> None:
        self._waiting.clear()
        self._times.clear()
        self._keys = None

    def due(self, now: float) -> list[Key]:
        """Return and remove the entries that are due, at most DUE_AT_ONCE_MAX. `timer_at` is in the
        past while more entries are due."""
        keys: list[Key] = []
        too_many = len(self._waiting) - REDELIVERIES_MAX
        while len(keys) < DUE_AT_ONCE_MAX and (due_at := self._first()) is not None:
            if due_at > now + REDELIVERY_TICK_S / 2 and len(keys) >= too_many:
                break
            _, _, key = heappop(self._times)
            del self._waiting[key]
            keys.append(key)
        self._maybe_compact()
        return keys

    def timer_at(self) -> float | None:
        """Return the time when the first entry is due. None: no entry waits."""
        due_at = self._first()
        if due_at is None:
            return None
        return 0.0 if len(self._waiting) > REDELIVERIES_MAX else due_at

    @property
    def stale_times(self) -> int:
        """Times in the heap that belong to no waiting entry."""
        return len(self._times) - len(self._waiting)

    def check(self) -> None:
        assert all(key == time[2] for key, time in self._waiting.items())
        assert set(self._waiting.values()) <= set(self._times)
        assert len(set(self._times)) == len(self._times)
        assert self.stale_times <= len(self._waiting) + STALE_TIMES_MAX
        if self._keys is not None:
            assert set(self._waiting) <= set(self._keys)
            assert len(self._keys) <= 2 * len(self._waiting) + STALE_TIMES_MAX

    def _maybe_compact(self) -> None:
        """Drop the stale times if they are too many, and the stale keys likewise. The cost is a
        constant for each of them."""
        if self.stale_times > len(self._waiting) + STALE_TIMES_MAX:
            self._times = list(self._waiting.values())
            heapify(self._times)
        if self._keys is not None and len(self._keys) > 2 * len(self._waiting) + STALE_TIMES_MAX:
            self._keys = list(self._waiting)
            heapify(self._keys)

    def _first(self) -> float | None:
        """Drop the stale times at the front of the heap. Return the first due time; None: none."""
        times = self._times
        while times:
            due_at, _, key = times[0]
            if self._waiting.get(key) is times[0]:
                return due_at
            heappop(times)
        return None
