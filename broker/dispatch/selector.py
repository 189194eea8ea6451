"""The selector protocol: which consumer of a Key_Shared subscription has which hash slots.

`add` and `remove` return the slots that moved, with the consumer that had them before. The
dispatcher registers the pending entries of these slots as draining.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from magnetar.broker.dispatch.key_shared_policy import HashRange
    from magnetar.broker.dispatch.permits import Consumer


class Moved(NamedTuple):
    """Slots first..last, both included, belong to another consumer than before, or to none."""

    first: int
    last: int
    source: Consumer | None  # the previous consumer of the slots; None: they had none


class Selector(Protocol):
    def slot_of(self, hashed: int) -> int:
        """The slot of a 31-bit hash: 1..65535."""

    def select(self, slot: int) -> Consumer | None:
        """The consumer that has the slot. None: no consumer has it."""

    def add(self, consumer: Consumer) -> list[Moved]:
        """Gives slots to the consumer, and returns the moved slots. Raises ConsumerRefused before
        any change."""

    def remove(self, consumer: Consumer) -> list[Moved]:
        """Takes the slots of the consumer away, and returns them. The consumer must have been
        added."""

    def ranges(self, consumer: Consumer) -> list[HashRange]:
        """The slots of the consumer, ascending; neighbouring ranges are merged."""

    def check(self) -> None:
        """Assert the invariants in the docstring of the selector's module."""


def merged(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins neighbouring ranges without a gap between them. `pieces` must ascend."""
    found: list[tuple[int, int]] = []
    for first, last in pieces:
        if found and found[-1][1] + 1 == first:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return found
