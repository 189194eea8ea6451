"""What a producer has sent, or will when it is attached again, and has no receipt for.

A broker answers the entries of a producer in the order in which they were sent, so receipts always
are for the head of the queue. When the connection is lost, everything that is left goes out again
in the same order on the next one.

An entry whose time has run out is reported at once, but if it was sent it keeps its place in the
queue, emptied: its receipt may still come, and has to be told from that of the next one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.client.producing.batching import Done


@dataclass(slots=True, eq=False)
class PendingEntry:
    """One entry on its way. Never changed, but for `parts` and `dones` once it is reported."""

    sequence_id: int  # of its first message
    highest_sequence_id: int  # of its last
    is_batch: bool
    parts: list[bytes]  # the encoded entry; empty once it is reported
    dones: list[Done]  # one for each message; empty once it is reported
    messages: int
    message_bytes: int
    due_at: float | None  # None: it may take for ever


class ReceiptOutOfOrder(Exception):
    """The broker answered something that is not the head of the queue."""

    definite = False

    def __init__(self, sequence_id: int, expected: int | None) -> None:
        super().__init__(f"a receipt for {sequence_id} where {expected} was to be answered")
        self.sequence_id = sequence_id
        self.expected = expected  # None: nothing was


class PendingEntries:
    """A machine: a queue of entries, answered in order.

    1. An entry that was appended is in the queue, or was given by `on_receipt`, `expire` or
       `abandon`, exactly once.
    2. While detached there are no emptied entries.
    3. Entries are due in the order of the queue.
    """

    def __init__(self) -> None:
        self._entries: deque[PendingEntry] = deque()
        self._attached = False
        self._emptied = 0
        self.emptied_bytes = 0  # of their messages
        self.appended = 0  # entries, ever
        self.reported = 0  # of them

    @property
    def attached(self) -> bool:
        """Whether an entry that is appended now has to be sent now."""
        return self._attached

    @property
    def emptied(self) -> int:
        """Entries that timed out and whose receipts are still to come."""
        return self._emptied

    def append(self, entry: PendingEntry) -> None:
        self._entries.append(entry)
        self.appended += 1

    def on_attached(self) -> list[PendingEntry]:
        """What to send, in order."""
        assert not self._attached
        self._attached = True
        return list(self._entries)

    def on_detached(self) -> None:
        """Receipts for what was sent will not come any more."""
        self._attached = False
        if self._emptied:
            self._entries = deque(entry for entry in self._entries if entry.dones)
            self._emptied = self.emptied_bytes = 0

    def on_receipt(self, sequence_id: int) -> PendingEntry | None:
        """The entry that is answered, which leaves the queue. None: it was reported already.

        Raises ReceiptOutOfOrder: the two sides disagree, and must begin anew.
        """
        expected = self._entries[0].sequence_id if self._entries else None
        if expected != sequence_id or not self._attached:
            raise ReceiptOutOfOrder(sequence_id, expected)
        entry = self._entries.popleft()
        if not entry.dones:
            self._forget(entry)
            return None
        self.reported += 1
        return entry

    def on_receipts(self, sequence_ids: Sequence[int]) -> list[PendingEntry | None]:
        """As `on_receipt` for one after the other. The list is shorter where the two sides
        disagree: `on_receipt` says about what."""
        answered: list[PendingEntry | None] = []
        entries = self._entries
        for sequence_id in sequence_ids:
            if not entries or entries[0].sequence_id != sequence_id or not self._attached:
                break
            entry = entries.popleft()
            if entry.dones:
                answered.append(entry)
            else:
                self._forget(entry)
                answered.append(None)
        self.reported += len(answered) - answered.count(None)
        return answered

    def expire(self, now: float) -> list[PendingEntry]:
        """The entries whose time has run out, to be reported."""
        expired: list[PendingEntry] = []
        for entry in self._entries:
            if not entry.dones:
                continue
            if entry.due_at is None or entry.due_at > now:
                break
            expired.append(self._report(entry))
        if self._attached:
            self._emptied += len(expired)
            self.emptied_bytes += sum(entry.message_bytes for entry in expired)
        else:
            for _ in expired:
                self._entries.popleft()
        return expired

    def abandon(self) -> list[PendingEntry]:
        """All entries, to be reported: nothing will be sent any more."""
        left = [self._report(entry) for entry in self._entries if entry.dones]
        self._entries.clear()
        self._emptied = self.emptied_bytes = 0
        return left

    def timer_at(self) -> float | None:
        """When `expire` has something to give. None: never, as it stands."""
        return next((entry.due_at for entry in self._entries if entry.dones), None)

    def check(self) -> None:
        emptied = sum(not entry.dones for entry in self._entries)
        assert emptied == self._emptied
        sizes = [entry.message_bytes for entry in self._entries if not entry.dones]
        assert sum(sizes) == self.emptied_bytes
        assert self._attached or not emptied
        assert self.appended - self.reported == len(self._entries) - emptied
        due = [entry.due_at for entry in self._entries if entry.due_at is not None]
        assert due == sorted(due)

    def _forget(self, entry: PendingEntry) -> None:
        """The receipt of an emptied entry has come."""
        self._emptied -= 1
        self.emptied_bytes -= entry.message_bytes

    def _report(self, entry: PendingEntry) -> PendingEntry:
        """A copy to report; the original stays behind, emptied."""
        self.reported += 1
        copy = replace(entry)
        entry.parts, entry.dones = [], []
        return copy
