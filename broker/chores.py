"""Periodic work on the open topics: one task for each kind of work, and no task for a topic.

In each round, a chore visits the open topics one after the other. After each VISITS_PER_TURN visits
it gives the event loop a turn. A visit that fails is logged, and the topic is visited again in the
next round.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.broker.refusal import OPERATING_ERRORS
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from magnetar.broker.guard import Failures
    from magnetar.broker.topic.protocol import Topic

VISITS_PER_TURN: Final = 100
"""The number of visits between two turns of the event loop. A visit without work takes some
microseconds."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Chore:
    """One kind of periodic work."""

    name: str
    period_s: float  # the time from the end of a round to the beginning of the next
    visit: Callable[[Topic], Awaitable[None]]  # may raise operating errors


class Chores:
    def __init__(
        self,
        chores: Sequence[Chore],
        topics: Callable[[], Sequence[Topic]],
        failures: Failures | None = None,
    ) -> None:
        """`topics` returns the topics that are open now. `failures` counts unexpected exceptions,
        which end only one visit; None: `run` raises them."""
        self._chores = chores
        self._topics = topics
        self._failures = failures

    async def run(self) -> None:
        """Do the chores until cancelled. The caller supervises this task."""
        async with asyncio.TaskGroup() as group:
            for chore in self._chores:
                group.create_task(self._repeat(chore), name=f"chore {chore.name}")
            await asyncio.Event().wait()

    async def _repeat(self, chore: Chore) -> None:
        while True:
            await asyncio.sleep(chore.period_s)
            for number, topic in enumerate(self._topics(), 1):
                try:
                    await chore.visit(topic)
                except OPERATING_ERRORS as error:
                    log.warning(
                        "chore failed", chore=chore.name, topic=str(topic.name), error=repr(error)
                    )
                except Exception as error:  # guard.py
                    if self._failures is None:
                        raise
                    self._failures.note(f"chore {chore.name}", str(topic.name), error)
                if number % VISITS_PER_TURN == 0:
                    await asyncio.sleep(0)
