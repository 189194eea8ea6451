"""The questions of a dispatcher to the cursor of its subscription."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from magnetar.broker.log.entry import StoredEntry
    from magnetar.broker.log.position import Position

_WORD: Final = (1 << 64) - 1


class Acks(Protocol):
    """A view of the cursor. Every question is answered from memory."""

    @property
    def mark_delete(self) -> Position:
        """The position up to which, inclusive, every entry is acknowledged."""

    @property
    def highest_acked(self) -> Position:
        """A position after which no entry is acknowledged, wholly or in part. It is at least
        `mark_delete`."""

    def is_acked(self, position: Position) -> bool:
        """Returns True when the whole entry is acknowledged."""

    def batch_ack_set(self, position: Position) -> tuple[int, ...] | None:
        """The unacknowledged messages of a partly acknowledged batch, as bits of signed 64-bit
        words. None: the cursor has no ack set of the entry."""

    def first_unacked(self, position: Position) -> Position:
        """The first unacknowledged entry at or after `position`. If there is none: the position
        after the last entry of the log."""


class Redeliveries(Protocol):
    """The redelivery counts of the unacknowledged entries of the subscription. The cursor keeps
    them, stores them, and removes the count of an entry when it is acknowledged."""

    def __bool__(self) -> bool: ...

    def __iter__(self) -> Iterator[Position]: ...

    def get(self, position: Position) -> int:
        """The redelivery count of the entry. 0: the entry was not redelivered."""

    def count_again(self, ledger: int, entries: Collection[int]) -> None:
        """Adds 1 to the counts of these entries, which will be redelivered. `entries` has no entry
        twice."""


def unacked_messages(entry: StoredEntry, acks: Acks) -> tuple[int, tuple[int, ...]]:
    """The number of unacknowledged messages of the entry, and its ack set. 0 and (): the whole
    entry is acknowledged. Above 0 and (): no message of the entry is acknowledged."""
    if acks.is_acked(entry.position):
        return 0, ()
    if not entry.view.is_batch:
        return 1, ()
    ack_set = acks.batch_ack_set(entry.position)
    if ack_set is None:
        return entry.view.num_messages, ()
    return unacked_in(ack_set), ack_set


def unacked_in(ack_set: tuple[int, ...]) -> int:
    """The number of unacknowledged messages in an ack set: the set bits of its 64-bit words."""
    return sum((word & _WORD).bit_count() for word in ack_set)
