"""Keeps the answers to a producer in the order of its sends. A machine.

The topic answers an appended entry when the log has it; the log reports its entries in order. An
answer without the log (duplicate, refuse) waits for the entries that were appended before it.

Invariants (`check`):
    1. The waiting answers are in the order of the sends, each behind at least one entry that the
       log does not have yet.
    2. `waiting` is what the answers that wait add up to.
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
        self.waiting = 0  # entries that are decided, and wait for those before them
        self._appended = 0  # entries that the log took
        self._known = 0  # those of these entries that are known to be in the log
        self._queue: deque[_Waiting] = deque()

    @property
    def outstanding(self) -> int:
        """Entries that the log took, and does not have yet."""
        return self._appended - self._known

    def on_append(self, entries: int) -> None:
        """The log took this many entries."""
        self._appended += entries

    def on_decided(self, decided: Decided) -> bool:
        """Duplicate, or refused. True: answer now; False: `on_appended` returns it in its turn."""
        if not self.outstanding:
            return True
        self._queue.append(_Waiting(self._appended, decided))
        self.waiting += decided.answer.count
        return False

    def on_appended(self, parts: Sequence[Appended]) -> Sequence[Appended | Decided]:
        """The log has these entries, in order. Returns the answers to send now, in order."""
        if not self._queue:
            for part in parts:
                self._known += part.count
            return parts
        ready: list[Appended | Decided] = []
        for part in parts:
            # A part ends where its publish ends, or before; so no answer belongs inside of it.
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
