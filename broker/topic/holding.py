"""The producers of a topic that hold publishes, and their resumption in FIFO order.

A producer waits either for the outcome of another publish, or for the publish rate. While the rate
is exceeded, `resume` does not visit the producers that wait for it: there may be thousands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

RESUMED_PER_TURN: Final = 500
"""The most producers that continue in one turn of the event loop, at about 15 us each."""


class Holder(Protocol):
    """A producer that holds publishes."""

    def resume(self, now: float) -> bool:
        """Continue with the held publishes. Returns True when at least one publish continued."""


class Holding:
    """Each producer adds and removes itself.

    Invariant (see `check`): a producer waits in one queue at most.
    """

    __slots__ = ("_exceeds_rate", "_for_outcome", "_for_rate")

    def __init__(self, exceeds_rate: Callable[[], bool] = lambda: False) -> None:
        """`exceeds_rate` returns True while the topic's publish rate is exceeded."""
        self._exceeds_rate = exceeds_rate
        self._for_outcome: dict[Holder, None] = {}
        self._for_rate: dict[Holder, None] = {}

    def __contains__(self, producer: Holder) -> bool:
        return producer in self._for_outcome or producer in self._for_rate

    def __len__(self) -> int:
        return len(self._for_outcome) + len(self._for_rate)

    def add(self, producer: Holder, *, for_rate: bool, last: bool = False) -> None:
        """Put the producer into the queue of what it waits for. If it is there already, it keeps
        its place; with `last`, it moves to the end."""
        queue, other = self._for_outcome, self._for_rate
        if for_rate:
            queue, other = other, queue
        other.pop(producer, None)
        if last:
            queue.pop(producer, None)
        queue[producer] = None

    def discard(self, producer: Holder) -> None:
        self._for_outcome.pop(producer, None)
        self._for_rate.pop(producer, None)

    def clear(self) -> None:
        self._for_outcome.clear()
        self._for_rate.clear()

    def resume(self, now: float) -> bool:
        """Continue the publishes whose wait is over, and then the publishes that waited for them.
        Returns True if RESUMED_PER_TURN producers have continued: more may be able to."""
        left = RESUMED_PER_TURN
        while left:
            before = left
            for producer in tuple(self._for_outcome):
                left -= producer.resume(now)
                if not left:
                    return True
            if self._for_rate and not self._exceeds_rate():
                for producer in tuple(self._for_rate):
                    left -= producer.resume(now)
                    if not left:
                        return True
                    if self._exceeds_rate():
                        break
            if left == before:
                return False
        return True

    def check(self) -> None:
        assert not self._for_outcome.keys() & self._for_rate.keys(), "a producer is in two queues"
