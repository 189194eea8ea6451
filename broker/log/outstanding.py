"""What a log has accepted and not confirmed, as a machine: the queue, and what is in flight.

An entry is taken (it gets its index and time, and its place), sent to the open ledger, and
confirmed; or it is put back when that ledger has closed without it, and sent to the next. Nothing
overtakes.

Invariants (`check`):
    1. In flight, then queued, is the order in which the entries were taken.
    2. Indexes are dense over their messages and end at the next one to be given.
    3. `bytes` is what both hold.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from magnetar.broker.errors import EntryTooLarge
from magnetar.protos.entry import (
    ENTRY_BYTES_MAX,
    broker_metadata_prefix,
    broker_metadata_prefixes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.protos.entry import EntryView


@dataclass(slots=True)
class Pending:
    """An entry that is not confirmed yet."""

    context: object
    data: bytes | memoryview  # what the producer sent
    prefix: bytes  # the broker's part, in front of it
    messages: int
    index: int  # of its last message
    timestamp_ms: int
    size: int  # of both parts
    view: EntryView | None  # of `data`; None: it is still to be made

    @property
    def first_index(self) -> int:
        return self.index - self.messages + 1


class Outstanding:
    def __init__(self, *, next_index: int) -> None:
        self.queue: deque[Pending] = deque()  # waits for a ledger
        self.in_flight: deque[Pending] = deque()  # in the ledger that is not closed
        self.bytes = 0
        self._next_index = next_index
        self._timestamp_ms = 0  # never goes backwards, so that a search by time finds something

    def take(self, view: EntryView, context: object, *, now_ms: int) -> Pending:
        """Accept an entry; the caller sends it or queues it. Raises EntryTooLarge."""
        timestamp_ms = max(now_ms, self._timestamp_ms)
        index = self._next_index + view.num_messages - 1
        prefix = broker_metadata_prefix(broker_timestamp_ms=timestamp_ms, index=index)
        size = len(prefix) + len(view.data)
        if size > ENTRY_BYTES_MAX:
            raise EntryTooLarge(size, ENTRY_BYTES_MAX)
        self._timestamp_ms = timestamp_ms
        self._next_index = index + 1
        self.bytes += size
        return Pending(
            context, view.data, prefix, view.num_messages, index, timestamp_ms, size, view
        )

    def take_plain(
        self, entries: Sequence[bytes], contexts: Sequence[object], *, now_ms: int
    ) -> list[Pending]:
        """Accept entries of one message each, of sizes that a producer may send."""
        timestamp_ms = max(now_ms, self._timestamp_ms)
        index = self._next_index
        prefixes = broker_metadata_prefixes(
            broker_timestamp_ms=timestamp_ms, first_index=index, count=len(entries)
        )
        taken: list[Pending] = []
        for context, data, prefix in zip(contexts, entries, prefixes, strict=True):
            size = len(prefix) + len(data)
            taken.append(Pending(context, data, prefix, 1, index, timestamp_ms, size, None))
            self.bytes += size
            index += 1
        self._timestamp_ms = timestamp_ms
        self._next_index = index
        return taken

    def confirm(self, count: int) -> list[Pending]:
        """The oldest so many of those in flight are in the log."""
        confirmed = [self.in_flight.popleft() for _ in range(count)]
        self.bytes -= sum(pending.size for pending in confirmed)
        return confirmed

    def put_back(self) -> int:
        """What is in flight goes in front of the queue. Returns how many that were."""
        count = len(self.in_flight)
        self.queue.extendleft(reversed(self.in_flight))
        self.in_flight.clear()
        return count

    def give_up(self) -> list[object]:
        """Forget everything; returns the contexts, in order."""
        contexts = [pending.context for pending in (*self.in_flight, *self.queue)]
        self.in_flight.clear()
        self.queue.clear()
        self.bytes = 0
        return contexts

    def check(self, *, confirmed_index: int) -> None:
        """`confirmed_index`: the first that is not confirmed."""
        index = confirmed_index
        for pending in (*self.in_flight, *self.queue):
            assert pending.first_index == index, "1, 2: order and indexes"
            index = pending.index + 1
        assert index == self._next_index, "2: the next index"
        sizes = sum(pending.size for pending in (*self.in_flight, *self.queue))
        assert self.bytes == sizes, "3: bytes"
