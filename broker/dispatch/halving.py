"""Auto-split hash ranges: each consumer has one range, and a new consumer halves the largest one.

Theory of operation. A range is stored as its upper bound, which belongs to the range. The last
bound is 65536, one above the last slot. A new consumer gets the lower half of the largest range. If
several ranges have the largest size, the lowest of them is halved. When a consumer leaves, its
range is merged into its right neighbour. The last range is merged into its left neighbour.

Invariants (`check`): the bounds are ascending; the last one is 65536; each consumer has one bound.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from magnetar.broker.dispatch.dispatcher import ConsumerRefused
from magnetar.broker.dispatch.key_shared_policy import HashRange
from magnetar.broker.dispatch.selector import Moved
from magnetar.broker.dispatch.sticky_hash import SLOTS, range_slot
from magnetar.broker.errors import ConsumerAssignFailed

if TYPE_CHECKING:
    from magnetar.broker.dispatch.permits import Consumer

WIDTH_MIN: Final = 2
"""A range of fewer slots is not split."""


class Halving:
    """A `Selector`."""

    def __init__(self, subscription: str) -> None:
        self._subscription = subscription
        self._bounds: list[int] = []
        self._consumers: list[Consumer] = []  # parallel to the bounds

    slot_of = staticmethod(range_slot)

    @property
    def bounds(self) -> list[tuple[int, Consumer]]:
        """The upper bound of each range, and its consumer."""
        return list(zip(self._bounds, self._consumers, strict=True))

    def select(self, slot: int) -> Consumer | None:
        return self._consumers[bisect_left(self._bounds, slot)] if self._bounds else None

    def add(self, consumer: Consumer) -> list[Moved]:
        if not self._bounds:
            self._bounds, self._consumers = [SLOTS], [consumer]
            return [Moved(1, SLOTS - 1, None)]
        sizes = [bound - start for start, bound in zip(self._starts(), self._bounds, strict=True)]
        at = sizes.index(max(sizes))
        if sizes[at] < WIDTH_MIN:
            problem = f"no hash range is left: {len(self._bounds)} consumers have them all"
            raise ConsumerRefused(ConsumerAssignFailed(self._subscription, problem))
        source, start = self._consumers[at], self._starts()[at]
        bound = self._bounds[at] - (sizes[at] >> 1)
        self._bounds.insert(at, bound)
        self._consumers.insert(at, consumer)
        return [Moved(start + 1 if at else 1, bound, source)]

    def remove(self, consumer: Consumer) -> list[Moved]:
        at = self._consumers.index(consumer)
        first, last = self._starts()[at] + 1, min(self._bounds[at], SLOTS - 1)
        del self._consumers[at]
        if at == len(self._bounds) - 1 and at > 0:
            del self._bounds[at - 1]
        else:
            del self._bounds[at]
        return [Moved(first, last, consumer)]

    def ranges(self, consumer: Consumer) -> list[HashRange]:
        at = self._consumers.index(consumer)
        return [HashRange(self._starts()[at] + 1, min(self._bounds[at], SLOTS - 1))]

    def check(self) -> None:
        assert self._bounds == sorted(set(self._bounds))
        assert not self._bounds or self._bounds[-1] == SLOTS
        assert len(set(self._consumers)) == len(self._consumers) == len(self._bounds)

    def _starts(self) -> list[int]:
        """The lower bound of each range, which does not belong to it."""
        return [0, *self._bounds[:-1]]
