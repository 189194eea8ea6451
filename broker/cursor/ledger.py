"""One cursor ledger while it is written: what is in it, and how much of that is still needed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from magnetar.broker.cursor import format as stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.bookie.ledger.errors import LedgerError
    from magnetar.broker.log.ledgers import Appender
    from magnetar.broker.log.position import Position


class Journaled(Protocol):
    """What is to be known of a cursor in order to store it."""

    @property
    def name(self) -> str: ...

    @property
    def number(self) -> int: ...

    @property
    def changed(self) -> bool:
        """Whether anything changed since the last delta or snapshot."""

    def take_delta(self) -> list[bytes]:
        """Records of what changed since the last delta or snapshot."""

    def snapshot(self) -> list[bytes]:
        """Records that say everything, what changed included."""

    def restart(self, mark: Position, number: int) -> None:
        """Everything up to `mark` is acknowledged and nothing else; `number` is its number now."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """Everything about its subscription is here or later."""

    entry: int
    offset: int  # bytes in the ledger before it
    size: int


class CursorLedger:
    """Invariant (`check`): the snapshots are in the order in which they were written."""

    def __init__(self, appender: Appender) -> None:
        self.appender = appender
        self.bytes = 0
        self._began_s = asyncio.get_running_loop().time()
        self._snapshots: dict[int, _Snapshot] = {}
        self._moved = asyncio.Event()
        appender.progress = self._moved.set

    @property
    def age_s(self) -> float:
        return asyncio.get_running_loop().time() - self._began_s

    @property
    def replay_from(self) -> int:
        """The first entry that is still needed."""
        return self._oldest.entry if self._snapshots else 0

    @property
    def live_bytes(self) -> int:
        return sum(snapshot.size for snapshot in self._snapshots.values())

    @property
    def tail_bytes(self) -> int:
        """What would be replayed."""
        return self.bytes - self._oldest.offset if self._snapshots else 0

    @property
    def stalest(self) -> int:
        """The subscription with the oldest snapshot."""
        return next(iter(self._snapshots))

    def begin(self, number: int) -> None:
        """A subscription whose snapshot is elsewhere, in the topic's record: it counts as here."""
        self._snapshots[number] = _Snapshot(self.appender.appended + 1, self.bytes, 0)

    def forget(self, number: int) -> None:
        self._snapshots.pop(number, None)

    def knows(self, number: int) -> bool:
        return number in self._snapshots

    def put(self, records: Sequence[bytes]) -> None:
        """Append without waiting. A failure shows in `wait_confirmed`."""
        groups = stored.entries_of(records)
        for group in groups:
            self._append(group, self.replay_from)

    def put_snapshot(self, cursor: Journaled) -> None:
        """It takes the place of what was written before only with its last entry: a ledger may end
        anywhere."""
        records = cursor.snapshot()
        taken = _Snapshot(self.appender.appended + 1, self.bytes, sum(map(len, records)))
        *first, last = stored.entries_of(records)
        for group in first:
            self._append(group, self.replay_from)
        self._snapshots.pop(cursor.number, None)
        self._snapshots[cursor.number] = taken
        self._append(last, self.replay_from)

    async def wait_confirmed(self) -> LedgerError | None:
        """Wait until all that was put is durable (None), or never will be."""
        appender = self.appender
        while appender.failure is None and appender.confirmed < appender.appended:
            self._moved.clear()
            await self._moved.wait()
        return appender.failure

    def _append(self, records: Sequence[bytes], replay_from: int) -> None:
        header = stored.header(replay_from=replay_from)
        size = len(header) + sum(map(len, records))
        self.bytes += size
        if self.appender.failure is None:
            self.appender.append_nowait([[header, *records]])

    @property
    def _oldest(self) -> _Snapshot:
        return next(iter(self._snapshots.values()))

    def check(self) -> None:
        entries = [snapshot.entry for snapshot in self._snapshots.values()]
        offsets = [snapshot.offset for snapshot in self._snapshots.values()]
        assert entries == sorted(entries)
        assert offsets == sorted(offsets)
        assert 0 <= self.tail_bytes <= self.bytes
