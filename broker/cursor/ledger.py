"""A cursor ledger that is being written: its snapshots, and the part that a recovery needs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from magnetar.broker.cursor import format as stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.bookie.ledger.errors import LedgerError
    from magnetar.broker.cursor.acks import Start
    from magnetar.broker.log.ledgers import Appender
    from magnetar.broker.log.position import Position


class Journaled(Protocol):
    """The part of a cursor that the journal needs to store it."""

    @property
    def name(self) -> str: ...

    @property
    def number(self) -> int: ...

    @property
    def changed(self) -> bool:
        """True when the state has changed since the last delta or snapshot."""

    @property
    def mark_delete(self) -> Position: ...

    def on_stored(self, mark: Position) -> bool:
        """`mark` is durable. Returns True if the cursor may no longer need one of the topic's
        ledgers: the topic then checks which ledgers it can trim."""

    def take_delta(self) -> list[bytes]:
        """Records of the changes since the last delta or snapshot."""

    def snapshot(self) -> list[bytes]:
        """Records of the whole state, changes included."""

    def restart(self, start: Start, number: int) -> None:
        """Replace all acknowledgements by the state `start`, and continue under a new number."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A place in the ledger: a recovery needs the records of a subscription only from here on. The
    subscription's last snapshot begins here, or it is in the topic's record (`size` is then 0)."""

    entry: int
    offset: int  # bytes in the ledger before it
    size: int


class CursorLedger:
    """An open cursor ledger. Invariant (`check`): its snapshots are in the order of writing."""

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
        """The first entry that a recovery needs."""
        return self._oldest.entry if self._snapshots else 0

    @property
    def live_bytes(self) -> int:
        return sum(snapshot.size for snapshot in self._snapshots.values())

    @property
    def tail_bytes(self) -> int:
        """The bytes that a recovery replays."""
        return self.bytes - self._oldest.offset if self._snapshots else 0

    @property
    def stalest(self) -> int:
        """The number of the subscription with the oldest snapshot."""
        return next(iter(self._snapshots))

    def begin(self, number: int) -> None:
        """Add a subscription whose snapshot is in the topic's record. A recovery needs this ledger
        for the subscription only from here on."""
        self._snapshots[number] = _Snapshot(self.appender.appended + 1, self.bytes, 0)

    def forget(self, number: int) -> None:
        self._snapshots.pop(number, None)

    def knows(self, number: int) -> bool:
        return number in self._snapshots

    def put(self, records: Sequence[bytes]) -> None:
        """Append without waiting. `wait_confirmed` reports a failure."""
        groups = stored.entries_of(records)
        for group in groups:
            self._append(group, self.replay_from)

    def put_snapshot(self, cursor: Journaled) -> None:
        """Append a snapshot. A recovery needs the earlier records of the cursor until the last
        entry of the snapshot is stored, because the ledger may end after any entry."""
        records = cursor.snapshot()
        taken = _Snapshot(self.appender.appended + 1, self.bytes, sum(map(len, records)))
        *first, last = stored.entries_of(records)
        for group in first:
            self._append(group, self.replay_from)
        self._snapshots.pop(cursor.number, None)
        self._snapshots[cursor.number] = taken
        self._append(last, self.replay_from)

    async def wait_confirmed(self) -> LedgerError | None:
        """Wait until every record is durable, or the ledger has failed. Returns the failure."""
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
