"""Sticky ranges: each consumer names the hash ranges that it wants.

The ranges of different consumers must not overlap. The application must cover all slots. If no
consumer has a slot, the entries of this slot wait until a consumer with the slot subscribes.

Invariants (`check`): ranges are ascending and do not overlap.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from magnetar.broker.dispatch.dispatcher import ConsumerRefused
from magnetar.broker.dispatch.key_shared_policy import HashRange
from magnetar.broker.dispatch.selector import Moved, merged
from magnetar.broker.dispatch.sticky_hash import SLOTS, range_slot
from magnetar.broker.errors import ConsumerAssignFailed

if TYPE_CHECKING:
    from magnetar.broker.dispatch.permits import Consumer

RANGES_MAX: Final = 10_000
"""The maximum number of hash ranges of one consumer. No consumer needs so many ranges. The broker
checks this number of ranges in a few milliseconds."""


class StickyRanges:
    """A `Selector`."""

    def __init__(self, subscription: str) -> None:
        self._subscription = subscription
        self._lasts: list[int] = []
        self._pieces: list[tuple[int, int, Consumer]] = []  # parallel to `_lasts`; ascending

    slot_of = staticmethod(range_slot)

    def select(self, slot: int) -> Consumer | None:
        at = bisect_left(self._lasts, slot)
        if at < len(self._pieces) and self._pieces[at][0] <= slot:
            return self._pieces[at][2]
        return None

    def add(self, consumer: Consumer) -> list[Moved]:
        wanted = self._checked(consumer)
        conflicts: dict[Consumer, HashRange] = {}
        for it in wanted:
            for at in range(bisect_left(self._lasts, it.first), len(self._pieces)):
                first, last, owner = self._pieces[at]
                if first > it.last:
                    break
                conflicts.setdefault(owner, HashRange(first, last))
        if conflicts:
            owner, overlap = next(iter(conflicts.items()))
            problem = (
                f"the ranges of consumer {consumer.name!r} overlap "
                f"[{overlap.first}, {overlap.last}] of consumer {owner.name!r}"
            )
            error = ConsumerAssignFailed(self._subscription, problem)
            raise ConsumerRefused(error, list(conflicts))
        self._set([*self._pieces, *((it.first, it.last, consumer) for it in wanted)])
        return [Moved(it.first, it.last, None) for it in wanted]

    def remove(self, consumer: Consumer) -> list[Moved]:
        moved = [Moved(first, last, it) for first, last, it in self._pieces if it is consumer]
        self._set([it for it in self._pieces if it[2] is not consumer])
        return moved

    def ranges(self, consumer: Consumer) -> list[HashRange]:
        pieces = [(first, last) for first, last, it in self._pieces if it is consumer]
        return [HashRange(*piece) for piece in merged(pieces)]

    def check(self) -> None:
        end = -1
        for first, last, _ in self._pieces:
            assert end < first <= last < SLOTS
            end = last
        assert self._lasts == [last for _, last, _ in self._pieces]

    def _set(self, pieces: list[tuple[int, int, Consumer]]) -> None:
        self._pieces = sorted(pieces, key=lambda it: it[0])
        self._lasts = [last for _, last, _ in self._pieces]

    def _checked(self, consumer: Consumer) -> list[HashRange]:
        """The ranges of the consumer, ascending. Raises ConsumerRefused."""
        ranges = consumer.key_shared.ranges if consumer.key_shared is not None else ()
        ranges = tuple(sorted(ranges[: RANGES_MAX + 1], key=lambda it: it.first))
        problem = ""
        if not ranges:
            problem = "it has no hash ranges"
        elif len(ranges) > RANGES_MAX:
            problem = f"it has more than {RANGES_MAX} hash ranges"
        for index, it in enumerate(ranges):
            if not 0 <= it.first <= it.last < SLOTS:
                problem = f"[{it.first}, {it.last}] is no hash range within [0, {SLOTS - 1}]"
            elif index and it.first <= ranges[index - 1].last:
                problem = f"its own hash ranges overlap at {it.first}"
        if problem:
            what = f"consumer {consumer.name!r} cannot be STICKY: {problem}"
            raise ConsumerRefused(ConsumerAssignFailed(self._subscription, what))
        return list(ranges)
