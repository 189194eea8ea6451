"""The entries of a producer that have no receipt yet.

A broker answers the entries of a producer in the order in which the producer sent them. Thus each
receipt is for the head of the queue. When the connection is lost, the producer sends all remaining
entries again, in the same order, on the next connection.

When the time limit of an entry passes, the producer reports a timeout at once. If the entry was
sent on the present connection, its place stays in the queue without the content: the receipt may
still arrive, and must not count as the receipt of the next entry.
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
    """One entry without a receipt.

    The publisher sets `sent_at` and `was_sent`. `expire` and `abandon` empty the entry. Nothing
    else changes it.
    """

    sequence_id: int  # the id of its first message
    highest_sequence_id: int  # the id of its last message
    is_batch: bool
    parts: list[bytes]  # the encoded entry
    dones: list[Done]  # one call for each message, or one for all
    messages: int
    message_bytes: int
    due_at: float | None  # None: no time limit
    # How many messages are no longer pending when the outcome of this entry is reported: 0 for a
    # chunk before the last.
    reserved: int = -1  # -1: as many as `messages`
    is_chunk: bool = False
    sent_at: float = 0.0
    was_sent: bool = False  # sent on some connection: it may be stored

    def __post_init__(self) -> None:
        if self.reserved < 0:
            self.reserved = self.messages


class ReceiptOutOfOrder(Exception):
    """The broker's receipt is not for the head of the queue."""

    definite = False

    def __init__(self, sequence_id: int, expected: int | None) -> None:
        super().__init__(f"receipt for sequence id {sequence_id}, expected {expected}")
        self.sequence_id = sequence_id
        self.expected = expected  # None: no entry waits for a receipt


class PendingEntries:
    """A machine: a queue of entries that the broker answers in order.

    1. An appended entry is returned exactly once, by `on_stored`, `on_receipt`, `on_receipts`,
       `expire` or `abandon`. Until then it is in the queue.
    2. While detached there are no emptied entries.
    3. Entries are due in the order of the queue.
    """

    def __init__(self) -> None:
        self._entries: deque[PendingEntry] = deque()
        self._attached = False
        self._emptied = 0
        self.emptied_bytes = 0  # message bytes of the emptied entries
        self.appended = 0  # entries since the start
        self.reported = 0  # entries since the start whose outcome is known

    @property
    def attached(self) -> bool:
        """True while the producer is attached. It must then send an appended entry at once."""
        return self._attached

    @property
    def awaits_receipts(self) -> bool:
        """True while the broker owes receipts."""
        return self._attached and bool(self._entries)

    @property
    def emptied(self) -> int:
        """The number of entries that timed out and whose receipts the broker still owes."""
        return self._emptied

    def append(self, entry: PendingEntry) -> None:
        self._entries.append(entry)
        self.appended += 1

    def on_attached(self) -> list[PendingEntry]:
        """Return the entries to send, in order."""
        assert not self._attached
        self._attached = True
        return list(self._entries)

    def on_stored(self, last_sequence_id: int) -> list[PendingEntry]:
        """Remove and return the entries at the head that the broker has stored.

        `last_sequence_id`: the last stored id, from the broker's answer to the new attachment.
        Called while detached.
        """
        assert not self._attached
        stored: list[PendingEntry] = []
        while self._entries and self._entries[0].highest_sequence_id <= last_sequence_id:
            stored.append(self._entries.popleft())
        self.reported += len(stored)
        return stored

    def on_detached(self) -> None:
        """Forget the emptied entries: their receipts can no longer arrive."""
        self._attached = False
        if self._emptied:
            self._entries = deque(entry for entry in self._entries if entry.dones)
            self._emptied = self.emptied_bytes = 0

    def on_receipt(self, sequence_id: int) -> PendingEntry | None:
        """Remove and return the entry of this receipt. None: the entry was reported already.

        Raises ReceiptOutOfOrder if the receipt is for another entry. The producer must then attach
        again.
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
        """Handle several receipts in order, as `on_receipt` does.

        The list ends before the first receipt that is out of order. To get the error, the caller
        passes this receipt to `on_receipt`.
        """
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
        """Return the entries whose time limit passed. The caller reports them."""
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
        """Remove all entries, and return those without an outcome. The caller reports them; they
        are not sent again."""
        left = [self._report(entry) for entry in self._entries if entry.dones]
        self._entries.clear()
        self._emptied = self.emptied_bytes = 0
        return left

    def timer_at(self) -> float | None:
        """Return the time at which the next entry expires. None: no entry has a time limit."""
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
        """Count off an emptied entry whose receipt arrived."""
        self._emptied -= 1
        self.emptied_bytes -= entry.message_bytes

    def _report(self, entry: PendingEntry) -> PendingEntry:
        """Return a copy to report, and empty the original, which stays in the queue."""
        self.reported += 1
        copy = replace(entry)
        entry.parts, entry.dones = [], []
        return copy
