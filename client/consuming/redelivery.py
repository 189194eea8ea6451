"""Entries to redeliver after a fixed delay: negatively acknowledged and unacknowledged ones.

The delay is the same for all entries. Thus entries are due in the order in which they were added,
and a dictionary is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from magnetar.client.ids import Key

REDELIVERY_TICK_S: Final = 0.1
"""Seconds. Entries due within half of this time are requested together with the first. Delays are
seconds or minutes, so the difference does not matter. A thousand single negative acknowledgements
need only a few commands."""

REDELIVERIES_MAX: Final = 1_000_000
"""Entries that wait, about 200 bytes each. Beyond this limit, the oldest are due at once."""

REDELIVERY_IDS_MAX: Final = 10_000
"""Entries in one command. At up to 24 bytes each, they fit into a command's limit of 256 KiB."""


class Redeliveries:
    """A machine: entries in, due entries out.

    1. Every entry that was added is still waiting, was discarded, or was returned as due.
    2. Entries wait in the order of their times.
    """

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._due_at: dict[Key, float] = {}

    def add(self, key: Key, now: float) -> None:
        """Request `key` again after the delay. A second call for a key restarts its delay."""
        self._due_at.pop(key, None)
        self._due_at[key] = now + self._delay_s

    def discard(self, key: Key) -> None:
        self._due_at.pop(key, None)

    def discard_through(self, key: Key) -> None:
        """Discard `key` and all keys before it."""
        for known in [known for known in self._due_at if known <= key]:
            del self._due_at[known]

    def clear(self) -> None:
        self._due_at.clear()

    def due(self, now: float) -> list[Key]:
        """Return and remove the entries that are due."""
        keys: list[Key] = []
        too_many = len(self._due_at) - REDELIVERIES_MAX
        for key, due_at in self._due_at.items():
            if due_at > now + REDELIVERY_TICK_S / 2 and len(keys) >= too_many:
                break
            keys.append(key)
        for key in keys:
            del self._due_at[key]
        return keys

    def timer_at(self) -> float | None:
        """Return when the first entry is due. None: no entry waits."""
        if not self._due_at:
            return None
        due_at = next(iter(self._due_at.values()))
        return due_at - self._delay_s if len(self._due_at) > REDELIVERIES_MAX else due_at

    def check(self) -> None:
        times = list(self._due_at.values())
        assert times == sorted(times)
