"""Reads a backlog ahead of its dispatch: while the broker delivers some entries, it reads the next
ones.

After each read of a backlog, `ReadAhead` reads the entries that follow, with the same limits of
entries and bytes. If the next read of the dispatcher begins at the first of these entries, it gets
them. Otherwise `ReadAhead` drops them. A subscription has at most one read ahead in flight. The
broker's budget counts the bytes of all reads ahead, and limits them to a share of the budget.

Near the end of the log there is no read ahead, because those entries are in the cache.
"""

from __future__ import annotations

import asyncio
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from magnetar.broker.errors import LogError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.log import Log
    from magnetar.broker.log.position import Position

    Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]

BACKLOG_ENTRIES_MIN: Final = 500
"""A read ahead is made only if at least this many entries follow the current read. A consumer that
follows the end of the log reads from the cache."""


class ReadAhead:
    """Reads ahead for one subscription. One task calls it."""

    __slots__ = ("_entries", "_entries_min", "_first", "_held", "_log", "_spawn", "_task")

    def __init__(
        self, topic_log: Log, spawn: Spawn, *, entries_min: int = BACKLOG_ENTRIES_MIN
    ) -> None:
        self._log = topic_log
        self._spawn = spawn
        self._entries_min = entries_min
        # The first of the held or requested entries; None: there are none.
        self._first: Position | None = None
        self._entries: list[StoredEntry] = []
        self._held = 0  # bytes that the budget counts
        self._task: asyncio.Task[None] | None = None  # None: no read is in flight

    async def read(self, first: Position, *, entries_max: int, bytes_max: int) -> list[StoredEntry]:
        """Like Log.read, with the same errors."""
        if first == self._first and self._task is not None:
            await asyncio.wait({self._task})
        if first == self._first and self._entries:
            found = self._take(entries_max, bytes_max)
        else:
            self.drop()
            found = await self._log.read(first, entries_max=entries_max, bytes_max=bytes_max)
        if found and not self._entries:
            self._maybe_start(found[-1].position, entries_max, bytes_max)
        return found

    def drop(self) -> None:
        """Drop the entries that were read ahead, and cancel the read in flight."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._first, self._entries = None, []
        self._count(0)

    @property
    def held_bytes(self) -> int:
        """The bytes that were read ahead, or that the read in flight may return."""
        return self._held

    def _take(self, entries_max: int, bytes_max: int) -> list[StoredEntry]:
        """Remove the first of the held entries, at least one, and return them."""
        sizes = accumulate(len(entry.data) for entry in self._entries[:entries_max])
        count = max(1, sum([size <= bytes_max for size in sizes]))
        found, self._entries = self._entries[:count], self._entries[count:]
        self._first = self._entries[0].position if self._entries else None
        self._count(sum([len(entry.data) for entry in self._entries]))
        return found

    def _maybe_start(self, last: Position, entries_max: int, bytes_max: int) -> None:
        chain = self._log.chain
        self.drop()
        if chain.entries(after=last, through=self._log.confirmed) < self._entries_min:
            return
        if not self._log.budget.may_read_ahead(bytes_max):
            return
        self._count(bytes_max)
        self._first = chain.next_position(last)
        work = self._read(self._first, entries_max, bytes_max)
        self._task = self._spawn(work)

    async def _read(self, first: Position, entries_max: int, bytes_max: int) -> None:
        """Read ahead. Ignores a failure: the dispatcher's own read will fail, too."""
        found: list[StoredEntry] = []
        try:
            found = await self._log.read(first, entries_max=entries_max, bytes_max=bytes_max)
        except LogError:
            pass
        finally:
            if self._task is asyncio.current_task():  # otherwise the read ahead was dropped
                self._task = None
                size = sum([len(entry.data) for entry in found])
                if found and found[0].position == first and self._fits(size):
                    self._entries = found
                    self._count(size)
                else:
                    self.drop()

    def _fits(self, size: int) -> bool:
        """Returns True when the budget lets the subscription hold this many bytes. They may be more
        than requested, because a read returns at least one entry."""
        more = size - self._held
        return more <= 0 or self._log.budget.may_read_ahead(more)

    def _count(self, size: int) -> None:
        self._log.budget.hold_ahead(size - self._held)
        self._held = size
