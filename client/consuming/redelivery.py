"""Entries to ask for again after a fixed delay: negative acknowledgements, and unacknowledged ones.

Because the delay is the same for all, the order in which entries are added is the order in which
they are due, and a dictionary is all it takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from magnetar.client.ids import Key

REDELIVERY_TICK_S: Final = 0.1
"""Entries due within half of this are asked for with the first: it does not matter to delays of
seconds and minutes, and nacks of a thousand messages one by one are a few commands."""

REDELIVERIES_MAX: Final = 1_000_000
"""Entries that wait, some 200 bytes each. At this many the oldest are due at once."""

REDELIVERY_IDS_MAX: Final = 10_000
"""Entries that one command asks for. At up to 24 bytes each they fit into the 256 KiB of one."""


class Redeliveries:
    """A machine: entries in, due entries out.

    1. Every entry that was added is still waiting, was discarded, or was given as due.
    2. Entries wait in the order of their times.
    """

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._due_at: dict[Key, float] = {}

    def add(self, key: Key, now: float) -> None:
        """Ask for `key` again after the delay; adding it once more starts the delay anew."""
        self._due_at.pop(key, None)
        self._due_at[key] = now + self._delay_s

    def discard(self, key: Key) -> None:
        self._due_at.pop(key, None)

    def discard_through(self, key: Key) -> None:
        """Discard `key` and all before it."""
        for known in [known for known in self._due_at if known <= key]:
            del self._due_at[known]

    def clear(self) -> None:
        self._due_at.clear()

    def due(self, now: float) -> list[Key]:
        """The entries whose time has come; they wait no longer."""
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
        """When `due` has something to give. None: nothing waits."""
        if not self._due_at:
            return None
        due_at = next(iter(self._due_at.values()))
        return due_at - self._delay_s if len(self._due_at) > REDELIVERIES_MAX else due_at

    def check(self) -> None:
        times = list(self._due_at.values())
        assert times == sorted(times)
