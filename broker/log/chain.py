"""The arithmetic of a log: its ledgers, and the number of entries of each ledger.

The chain computes the next position, or the number of entries between two positions, from the
counts alone. It does no I/O. Only the log changes the chain: when a ledger opens, grows, closes or
is dropped.

Invariants (`check`):
    1. Ledger ids strictly increase. First indexes never decrease.
    2. Every ledger but the last has entries: an empty ledger is removed when it closes.
    3. Only the last ledger may be open. Its record has no closing time; the other records have one.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

from magnetar.broker.log.position import EARLIEST, LATEST, Position
from magnetar.metadata.model import DroppedHead, EntryId, LedgerId, TopicLedger


class Chain:
    """The ledgers of one log, from the oldest to the newest.

    `ledgers`: closed ledgers with entries. `next_index`: the index of the next message."""

    __slots__ = ("_at", "_ids", "_records", "_starts", "counts", "dropped", "next_index")

    def __init__(
        self,
        ledgers: Iterable[TopicLedger] = (),
        *,
        next_index: int = 0,
        dropped: DroppedHead | None = None,
    ) -> None:
        self._records: list[TopicLedger] = []  # the ledgers, as in the topic's record
        self._ids: list[int] = []
        self._starts: list[int] = []  # for each ledger the number of entries in all earlier ledgers
        self._at: dict[int, int] = {}  # ledger id -> place in the lists
        self.counts: dict[int, int] = {}  # ledger id -> confirmed entries; cursors share it
        self.next_index = next_index
        self.dropped = dropped  # the newest dropped ledger; None: none was dropped
        for record in ledgers:
            self._append(record)

    # ---- questions -------------------------------------------------------------------------------

    @property
    def confirmed(self) -> Position:
        """The position of the last confirmed entry. If the chain has only an empty ledger: the
        position before its first entry. If the chain has no ledger: the last position of the
        dropped ledgers; EARLIEST if no ledger was dropped."""
        for ledger in reversed(self._ids):  # at most the last one is empty
            if self.counts[ledger] > 0:
                return Position(ledger, self.counts[ledger] - 1)
        if self._ids:
            return Position(self._ids[0], -1)
        return EARLIEST if self.dropped is None else Position(*self.dropped.last)

    @property
    def has_closed(self) -> bool:
        """True when a ledger is closed. Then the first ledger is closed, too."""
        return bool(self._records) and self._records[0].closed_ms > 0

    @property
    def last_closed(self) -> Position:
        """The position of the last entry of the last closed ledger, also if that ledger was
        dropped. EARLIEST: no ledger was ever closed."""
        for record in reversed(self._records):  # at most the last one is open
            if record.closed_ms > 0:
                return Position(record.ledger, record.entries - 1)
        return EARLIEST if self.dropped is None else Position(*self.dropped.last)

    @property
    def first(self) -> Position:
        """The position of the first entry. If the chain has no entry: the position of the next
        entry."""
        return Position(self._ids[0], 0) if self._ids else self.end

    @property
    def end(self) -> Position:
        """The position of the next entry, right after `confirmed`. When the log opens a new ledger,
        the end moves there. A caller that kept an earlier end passes it to `ceiling`."""
        return self.next_position(self.confirmed)

    @property
    def records(self) -> tuple[TopicLedger, ...]:
        return tuple(self._records)

    def records_from(self, ledger: int) -> list[TopicLedger]:
        """Return the records of this ledger and of all later ones."""
        return self._records[bisect_left(self._ids, ledger) :]

    @property
    def newest(self) -> int:
        """The id of the last ledger. If the chain has none: that of the last dropped ledger that
        had entries; -1 if there is none."""
        if self._ids:
            return self._ids[-1]
        return -1 if self.dropped is None else self.dropped.ledger

    @property
    def entry_count(self) -> int:
        return self._starts[-1] + self.counts[self._ids[-1]] if self._ids else 0

    @property
    def first_index(self) -> int:
        """The index of the first message. If the chain is empty: the index of the next message."""
        return self._records[0].first_index if self._records else self.next_index

    @property
    def messages(self) -> int:
        return self.next_index - self.first_index

    def next_ledger(self, ledger: int) -> int | None:
        """Return the id of the next ledger. None: this ledger is the last, or not in the chain."""
        place = self._at.get(ledger)
        return None if place is None or place + 1 == len(self._ids) else self._ids[place + 1]

    def index_bounds(self, ledger: int) -> tuple[int, int]:
        """Return the index of the first message in this ledger, and of the first message after this
        ledger."""
        place = self._at[ledger]
        following = place + 1 < len(self._ids)
        end = self._records[place + 1].first_index if following else self.next_index
        return self._records[place].first_index, end

    def is_plain(self, ledger: int) -> bool:
        """Return whether every entry of this ledger holds one message."""
        first, end = self.index_bounds(ledger)
        return end - first == self.counts[ledger]

    def messages_per_entry(self, ledger: int) -> float:
        """Return the average number of messages in an entry. 1.0 while the ledger has no entry."""
        first, end = self.index_bounds(ledger)
        return (end - first) / self.counts[ledger] if self.counts[ledger] > 0 else 1.0

    def index_near(self, position: Position) -> tuple[int, bool]:
        """Return the index of the last message at or before `position`, and True if this index is
        exact. Inside a ledger with batches, the index is interpolated."""
        if not self.is_entry(position):
            position = self.previous_position(self.ceiling(position))
        if not self.is_entry(position):
            return self.first_index - 1, True
        first, end = self.index_bounds(position.ledger)
        count = self.counts[position.ledger]
        exact = end - first == count or position.entry + 1 == count
        return first + (end - first) * (position.entry + 1) // count - 1, exact

    def is_closed(self, ledger: int) -> bool:
        """Return whether this ledger is in the chain and closed."""
        place = self._at.get(ledger)
        return place is not None and self._records[place].closed_ms > 0

    def droppable(self, position: Position) -> int:
        """Return how many ledgers at the head are closed and have no entry after `position`."""
        count = 0
        for record in self._records:
            last = Position(record.ledger, self.counts[record.ledger] - 1)
            if record.closed_ms == 0 or last > position:
                break
            count += 1
        return count

    def head_without(self, count: int) -> DroppedHead | None:
        """Return the value that `dropped` gets when the first `count` ledgers are dropped. They
        must be closed."""
        if count == 0:
            return self.dropped
        last = self._records[count - 1]
        assert last.closed_ms > 0, "the open ledger is not dropped"
        has_more = count < len(self._records)
        next_index = self._records[count].first_index if has_more else self.next_index
        return DroppedHead(last.ledger, EntryId(self.counts[last.ledger] - 1), next_index)

    def is_entry(self, position: Position) -> bool:
        return 0 <= position.entry < self.counts.get(position.ledger, 0)

    def next_position(self, position: Position) -> Position:
        place = self._at.get(position.ledger)
        if place is None:
            place = bisect_right(self._ids, position.ledger)
            if place < len(self._ids):
                return Position(self._ids[place], 0)
            last = self.confirmed
            return Position(last.ledger, last.entry + 1)
        count = self.counts[position.ledger]
        if position.entry + 1 >= count:
            if place + 1 < len(self._ids):
                return Position(self._ids[place + 1], 0)
            return Position(position.ledger, count)
        return Position(position.ledger, max(position.entry, -1) + 1)

    def previous_position(self, position: Position) -> Position:
        """Return the entry before `position`. If there is none, return entry -1 of the ledger of
        `position`."""
        place = self._at.get(position.ledger)
        count = self.counts.get(position.ledger, 0)
        if position.entry > 0 and count > 0:
            return Position(position.ledger, min(position.entry, count) - 1)
        if place is None:
            place = bisect_left(self._ids, position.ledger)
        if place > 0 and self.counts[self._ids[place - 1]] == 0:
            place -= 1
        if place == 0:
            return Position(position.ledger, -1)
        before = self._ids[place - 1]
        return Position(before, self.counts[before] - 1)

    def ceiling(self, position: Position) -> Position:
        """Return the first entry at or after `position`. If there is none, return `end`."""
        if position == LATEST:
            return self.end
        place = self._at.get(position.ledger)
        if place is None:
            place = bisect_right(self._ids, position.ledger)
        elif position.entry < self.counts[position.ledger]:
            return Position(position.ledger, max(position.entry, 0))
        else:
            place += 1
        return Position(self._ids[place], 0) if place < len(self._ids) else self.end

    def rank(self, position: Position) -> int:
        """Return the number of entries at or before `position`."""
        place = self._at.get(position.ledger)
        if place is None:
            place = bisect_right(self._ids, position.ledger)
            return self._starts[place] if place < len(self._ids) else self.entry_count
        return self._starts[place] + min(max(position.entry + 1, 0), self.counts[position.ledger])

    def at_rank(self, rank: int) -> Position:
        """Return the entry with this rank. The first entry has rank 1."""
        assert 1 <= rank <= self.entry_count, rank
        place = bisect_left(self._starts, rank) - 1
        return Position(self._ids[place], rank - 1 - self._starts[place])

    def entries(self, *, after: Position, through: Position) -> int:
        """Return the number of entries after `after`, up to and including `through`."""
        return max(self.rank(through) - self.rank(after), 0)

    # ---- changes, by the log ---------------------------------------------------------------------

    def open_ledger(self, record: TopicLedger) -> None:
        """Add a new, empty ledger, which takes the next entries."""
        assert record.entries == 0, record
        assert record.closed_ms == 0, record
        self._append(record)

    def grow(self, entries: int, *, next_index: int) -> None:
        """Set the number of confirmed entries of the last ledger, and the next index."""
        assert entries >= self.counts[self._ids[-1]], "confirmed entries do not vanish"
        assert next_index >= self.next_index, "indexes do not go backwards"
        self.counts[self._ids[-1]] = entries
        self.next_index = next_index

    def close_ledger(self, *, length: int, closed_ms: int) -> TopicLedger | None:
        """Close the last ledger. Returns its record. None: it was empty, so it was removed."""
        assert self._records[-1].closed_ms == 0, "closed already"
        ledger = self._ids[-1]
        entries = self.counts[ledger]
        if entries == 0:
            for parts in (self._records, self._ids, self._starts):
                parts.pop()
            del self._at[ledger], self.counts[ledger]
            return None
        closed = replace(self._records[-1], entries=entries, length=length, closed_ms=closed_ms)
        self._records[-1] = closed
        return closed

    def drop_head(self, count: int) -> tuple[LedgerId, ...]:
        """Drop the first `count` ledgers, which must be closed. Returns their ids. The indexes of
        all other messages stay the same."""
        if count == 0:
            return ()
        self.dropped = self.head_without(count)
        dropped = [record.ledger for record in self._records[:count]]
        for ledger in dropped:
            del self.counts[ledger]
        left = self._records[count:]
        entries = self._starts[count] if left else 0
        self._records = left
        self._ids = self._ids[count:]
        self._starts = [start - entries for start in self._starts[count:]]
        self._at = {ledger: place for place, ledger in enumerate(self._ids)}
        return tuple(dropped)

    def _append(self, record: TopicLedger) -> None:
        assert record.ledger > self.newest, "an id handed to a topic exceeds its newest ledger"
        assert not self._ids or self.counts[self._ids[-1]] > 0, "an empty ledger was left inside"
        self._at[record.ledger] = len(self._ids)
        self._starts.append(self.entry_count)
        self._ids.append(record.ledger)
        self.counts[record.ledger] = record.entries
        self._records.append(record)

    def check(self) -> None:
        for before, after in pairwise(self._records):
            assert before.ledger < after.ledger, "1: ids"
            assert before.first_index <= after.first_index, "1: indexes"
            assert before.closed_ms > 0, "3: only the last may be open"
        counts = [self.counts[ledger] for ledger in self._ids]
        assert all(count > 0 for count in counts[:-1]), "2: an empty ledger inside"
        assert self._ids == [record.ledger for record in self._records]
        assert self._at == {ledger: place for place, ledger in enumerate(self._ids)}
        assert self._starts == [sum(counts[:place]) for place in range(len(self._ids))]
        assert len(self.counts) == len(self._ids)
        assert self.next_index >= self.first_index
        if self.dropped is not None:
            assert not self._ids or self._ids[0] > self.dropped.ledger, (
                "1: a dropped ledger is back"
            )
            assert self.first_index >= self.dropped.next_index, "1: indexes continue after the head"
