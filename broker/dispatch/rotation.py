"""The choice of the next consumer: round-robin among available consumers of the best priority."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from magnetar.broker.dispatch.permits import Consumer


@dataclass(slots=True)
class _Level:
    """The consumers of one priority, in the order of joining."""

    priority: int
    consumers: list[Consumer]
    turn: int = 0  # index of the next consumer


@dataclass(slots=True)
class Rotation:
    """All consumers of a subscription.

    Each level has its own turn, so serving a better level does not change the order of the others.

    Invariants (see `check`):
        1. Levels are ordered by priority, and none is empty.
        2. `turn` is an index of its level.
    """

    _levels: list[_Level] = field(default_factory=list)

    def __iter__(self) -> Iterator[Consumer]:
        for level in self._levels:
            yield from level.consumers

    def __bool__(self) -> bool:
        return bool(self._levels)

    def add(self, consumer: Consumer) -> None:
        for level in self._levels:
            if level.priority == consumer.priority:
                level.consumers.append(consumer)
                return
        insort(self._levels, _Level(consumer.priority, [consumer]), key=lambda it: it.priority)

    def remove(self, consumer: Consumer) -> None:
        """The consumer must have been added."""
        level = next(it for it in self._levels if it.priority == consumer.priority)
        index = level.consumers.index(consumer)
        del level.consumers[index]
        if index < level.turn:
            level.turn -= 1
        if level.turn == len(level.consumers):
            level.turn = 0
        if not level.consumers:
            self._levels.remove(level)

    def next_available(self) -> Consumer | None:
        """The next available consumer. None: no consumer is available."""
        for level in self._levels:
            consumers = level.consumers
            for step in range(len(consumers)):
                index = (level.turn + step) % len(consumers)
                if consumers[index].available:
                    level.turn = (index + 1) % len(consumers)
                    return consumers[index]
        return None

    def check(self) -> None:
        """Assert the invariants of the class's docstring."""
        priorities = [level.priority for level in self._levels]
        assert priorities == sorted(set(priorities))
        for level in self._levels:
            assert level.consumers
            assert 0 <= level.turn < len(level.consumers)
            assert all(consumer.priority == level.priority for consumer in level.consumers)
