"""Keeps the answers to a producer in the order of its sends. A machine.

The topic answers an appended entry when the log reports it as durable; the log reports entries in
order. An answer that does not depend on the log (duplicate, refuse) waits until the entries of this
producer that were appended earlier are durable.

Invariants (`check`):
    1. The waiting answers are in the order of the sends. Each waits for at least one entry that is
       not durable yet.
    2. `waiting` is the number of entries of the waiting answers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magnetar.broker.log.outstanding import Appended
    from magnetar.broker.topic.pipeline import Decided


@dataclass(frozen=True, slots=True)
class _Waiting:
    behind: int  # number of entries that were appended before it
    decided: Decided


class AnswerOrder:
    def __init__(self) -> None:
        self.waiting = 0  # decided entries that wait for the entries before them
        self._appended = 0  # entries that were appended to the log
        self._known = 0  # appended entries that the log has reported as durable
        self._queue: deque[_Waiting] = deque()

    @property
    def outstanding(self) -> int:
        """The number of appended entries that are not durable yet."""
        return self._appended - self._known

    def on_append(self, entries: int) -> None:
        """This many entries were appended to the log."""
        self._appended += entries

    def on_decided(self, decided: Decided) -> bool:
        """These entries are duplicates, or refused. Returns True when the answer must be sent now.
        False: a later `on_appended` returns the answer, in order."""
        if not self.outstanding:
            return True
        self._queue.append(_Waiting(self._appended, decided))
        self.waiting += decided.answer.count
        return False

    def on_appended(self, parts: Sequence[Appended]) -> Sequence[Appended | Decided]:
        """These entries are durable. Returns the answers to send now, in order."""
        if not self._queue:
            for part in parts:
                self._known += part.count
            return parts
        ready: list[Appended | Decided] = []
        for part in parts:
            # A part ends where its publish ends, or before. So no answer belongs inside a part.
            self._known += part.count
            ready.append(part)
            while self._queue and self._queue[0].behind <= self._known:
                decided = self._queue.popleft().decided
                self.waiting -= decided.answer.count
                ready.append(decided)
        return ready

    def clear(self) -> None:
        """Forget the waiting answers."""
        self._queue.clear()
        self.waiting = 0

    def check(self) -> None:
        assert all(each.behind > self._known for each in self._queue), "1: it could be answered"
        for before, after in pairwise(self._queue):
            assert before.behind <= after.behind, "1: order"
        assert self.waiting == sum(each.decided.answer.count for each in self._queue), "2"
