"""The entries that a log has accepted and not confirmed: runs of entries in one order. A machine.

The log takes a run (its entries get their indexes and their time), sends it to the open ledger, and
confirms it. A ledger may get only a part of a run, and may confirm only a part of that. If a ledger
closes without some entries, they are queued again and sent to the next ledger. The order of entries
never changes.

Invariants (`check`):
    1. Runs are in the order in which they were taken. Of the entries in that order, first come the
    confirmed ones (a wholly confirmed run is removed), then those in flight, then the queued ones.
    2. Indexes are dense over the messages, and the next index follows the last one.
    3. `bytes`, `queued` and `in_flight` are the sums over the runs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from magnetar.protos.entry import broker_metadata_prefixes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from magnetar.protos.entry import EntryView


@dataclass(slots=True, eq=False)
class AppendRun:
    """The entries of one append. Places in the run count from 0."""

    context: object
    entries: Sequence[bytes]  # the entries as the producer sent them
    views: Mapping[int, EntryView]  # keyed by place; an entry without a view holds one message
    prefixes: list[bytes]  # the broker's part, in front of each entry
    first_index: int  # the index of the first message
    indexes: Sequence[int]  # the index of the last message of each entry
    timestamp_ms: int
    size: int  # the size of entries and prefixes
    sent: int = 0  # number of entries that were sent to a ledger
    confirmed: int = 0  # number of the sent entries that are in the log

    def size_of(self, start: int, stop: int) -> int:
        """Bytes of the entries at these places, with their prefixes."""
        if start == 0 and stop == len(self.entries):
            return self.size
        return sum(map(len, self.entries[start:stop])) + sum(map(len, self.prefixes[start:stop]))

    def messages_of(self, start: int, stop: int) -> int:
        before = self.indexes[start - 1] if start > 0 else self.first_index - 1
        return self.indexes[stop - 1] - before


@dataclass(slots=True)
class Appended:
    """Consecutive entries of one run that are in the log."""

    run: AppendRun
    start: int  # the places of these entries in the run
    stop: int
    ledger: int
    first_entry: int  # id of the entry at place `start`
    messages: int
    bytes: int  # the size of the entries as the producer sent them

    @property
    def context(self) -> object:
        return self.run.context

    @property
    def count(self) -> int:
        return self.stop - self.start


_NO_RUNS: Final[deque[AppendRun]] = deque(maxlen=0)
"""Shared by the logs without an append so far: an empty deque takes 760 bytes."""


class Outstanding:
    __slots__ = (
        "_next_index",
        "_queue",
        "_runs",
        "_timestamp_ms",
        "bytes",
        "in_flight",
        "queued",
    )

    def __init__(self, *, next_index: int, timestamp_ms: int = 0) -> None:
        """`timestamp_ms`: the broker's time of the last entry in the log; 0: there is no entry."""
        self.bytes = 0
        self.queued = 0  # entries that wait for a ledger
        self.in_flight = 0  # entries that were sent to a ledger and are not confirmed
        self._runs = _NO_RUNS  # runs with an entry that is not confirmed
        self._queue = _NO_RUNS  # the runs at the end of `_runs` that are not wholly sent
        self._next_index = next_index
        # Never goes backwards, not even at a takeover or when a clock is set back: a search by time
        # needs ascending times.
        self._timestamp_ms = timestamp_ms

    def take(
        self,
        entries: Sequence[bytes],
        views: Mapping[int, EntryView],
        context: object,
        *,
        now_ms: int,
    ) -> None:
        """Accept entries and queue them. Their sizes must be sizes that a producer may send."""
        assert entries, "a run has an entry"
        self._timestamp_ms = timestamp_ms = max(now_ms, self._timestamp_ms)
        first_index, count = self._next_index, len(entries)
        indexes: Sequence[int] = range(first_index, first_index + count)
        if views:
            indexes = _indexes(first_index, count, views)
        prefixes = broker_metadata_prefixes(broker_timestamp_ms=timestamp_ms, indexes=indexes)
        size = sum(map(len, entries)) + sum(map(len, prefixes))
        run = AppendRun(context, entries, views, prefixes, first_index, indexes, timestamp_ms, size)
        self._next_index = indexes[-1] + 1
        self.bytes += size
        self.queued += count
        if self._runs is _NO_RUNS:
            self._runs, self._queue = deque(), deque()
        self._runs.append(run)
        self._queue.append(run)

    @property
    def first_queued_index(self) -> int:
        """Index of the first queued message. An entry must be queued."""
        run = self._queue[0]
        return run.indexes[run.sent - 1] + 1 if run.sent > 0 else run.first_index

    def unsent(self, *, entries_max: int, bytes_max: int) -> list[tuple[bytes, bytes]]:
        """The first queued entries, each as prefix and data: at most `entries_max`. The entry with
        which their size reaches `bytes_max` is the last one, so at least one is returned."""
        run = self._queue[0]
        is_alone = len(self._queue) == 1 and run.sent == 0
        if is_alone and len(run.entries) <= entries_max and run.size < bytes_max:
            return list(zip(run.prefixes, run.entries, strict=True))
        found: list[tuple[bytes, bytes]] = []
        for run in self._queue:
            places = slice(run.sent, run.sent + entries_max - len(found))
            for parts in zip(run.prefixes[places], run.entries[places], strict=True):
                found.append(parts)
                bytes_max -= len(parts[0]) + len(parts[1])
                if bytes_max <= 0:
                    return found
            if len(found) >= entries_max:
                break
        return found

    def on_sent(self, count: int) -> int:
        """The first `count` queued entries were sent to the open ledger. Returns their size."""
        self.queued -= count
        self.in_flight += count
        size = 0
        while count > 0:
            run = self._queue[0]
            stop = min(len(run.entries), run.sent + count)
            size += run.size_of(run.sent, stop)
            count -= stop - run.sent
            run.sent = stop
            if stop == len(run.entries):
                self._queue.popleft()
        return size

    def confirm(self, count: int, *, ledger: int, first_entry: int) -> list[Appended]:
        """The first `count` entries in flight are in the log, as entries of this ledger."""
        assert count <= self.in_flight, "confirmed more than was sent"
        self.in_flight -= count
        appended: list[Appended] = []
        while count > 0:
            run = self._runs[0]
            start, stop = run.confirmed, min(run.sent, run.confirmed + count)
            size, messages = run.size_of(start, stop), run.messages_of(start, stop)
            sent_bytes = size - sum(map(len, run.prefixes[start:stop]))
            appended.append(Appended(run, start, stop, ledger, first_entry, messages, sent_bytes))
            self.bytes -= size
            first_entry += stop - start
            count -= stop - start
            run.confirmed = stop
            if stop == len(run.entries):
                self._runs.popleft()
        return appended

    def put_back(self) -> int:
        """Queue the entries in flight again, in their order. Returns their number."""
        count = self.in_flight
        for run in self._runs:
            run.sent = run.confirmed
        if self._runs is not _NO_RUNS:
            self._queue = deque(self._runs)
        self.queued += count
        self.in_flight = 0
        return count

    def give_up(self) -> list[AppendRun]:
        """Forget all runs. Returns the runs that are not wholly confirmed, in order."""
        runs = list(self._runs)
        self._runs.clear()
        self._queue.clear()
        self.bytes = self.queued = self.in_flight = 0
        return runs

    def check(self, *, confirmed_index: int) -> None:
        """`confirmed_index`: index of the first message that is not confirmed."""
        index = confirmed_index
        whole = True
        for run in self._runs:
            assert 0 <= run.confirmed <= run.sent <= len(run.entries), "1: a run's parts"
            assert run.confirmed < len(run.entries), "1: a run that is confirmed stays"
            assert whole or run.sent == 0, "1: sent before an earlier run"
            whole = run.sent == len(run.entries)
            first = run.indexes[run.confirmed - 1] + 1 if run.confirmed else run.first_index
            assert first == index, "1, 2: order and indexes"
            index = run.indexes[-1] + 1
        assert index == self._next_index, "2: the next index"
        assert list(self._queue) == [run for run in self._runs if run.sent < len(run.entries)], (
            "1: the queue"
        )
        sizes = [run.size_of(run.confirmed, len(run.entries)) for run in self._runs]
        assert self.bytes == sum(sizes), "3: bytes"
        assert self.queued == sum(len(run.entries) - run.sent for run in self._runs), "3: queued"
        assert self.in_flight == sum(run.sent - run.confirmed for run in self._runs), "3: in flight"


def _indexes(first_index: int, count: int, views: Mapping[int, EntryView]) -> list[int]:
    """The index of the last message of each entry."""
    messages = [1] * count
    for place, view in views.items():
        messages[place] = view.num_messages
    return list(accumulate(messages, initial=first_index - 1))[1:]
