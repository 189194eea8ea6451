"""The watchers of a log, such as its subscriptions: they are called when the log has changed.

A topic may have thousands of subscriptions, and a call takes 10 us. So a change calls at most
CALLED_PER_TURN watchers at once, and the others in later turns of the event loop, in FIFO order.
While watchers wait for their calls, the next change calls none at once. A watcher that waited
already is called once for both changes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from magnetar.broker.log.position import Position

CALLED_PER_TURN: Final = 500
"""The watchers that are called in one turn of the event loop, in 5 ms."""


@dataclass(frozen=True, slots=True, eq=False)
class Watcher:
    callback: Callable[[], None]
    read_position: Callable[[], Position]
    watchers: dict[Watcher, None]  # all watchers of the log

    def end(self) -> None:
        self.watchers.pop(self, None)


class Watchers:
    __slots__ = ("_all", "_waiting")

    def __init__(self) -> None:
        self._all: dict[Watcher, None] = {}
        # The watchers to be called in later turns. While there are some, a call of `_call_some` is
        # scheduled. None: no change has found more than CALLED_PER_TURN watchers.
        self._waiting: OrderedDict[Watcher, None] | None = None

    def __iter__(self) -> Iterator[Watcher]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def add(self, callback: Callable[[], None], read_position: Callable[[], Position]) -> Watcher:
        watcher = Watcher(callback, read_position, self._all)
        self._all[watcher] = None
        return watcher

    def call(self, protect: Callable[[Callable[[], None]], None]) -> None:
        """Call every watcher. If there are more than CALLED_PER_TURN, or if some still wait, call
        them in slices. `protect` runs the slices of later turns, because no caller is there to
        handle their errors."""
        if len(self._all) <= CALLED_PER_TURN and not self._waiting:
            for watcher in tuple(self._all):
                watcher.callback()
            return
        if self._waiting is None:
            self._waiting = OrderedDict()
        is_scheduled = bool(self._waiting)
        self._waiting.update(self._all)
        if not is_scheduled:
            self._call_some(protect)

    def _call_some(self, protect: Callable[[Callable[[], None]], None]) -> None:
        waiting = self._waiting
        assert waiting is not None
        count = min(CALLED_PER_TURN, len(waiting))
        ready = [waiting.popitem(last=False)[0] for _ in range(count)]
        if waiting:  # scheduled first: a callback may raise
            loop = asyncio.get_running_loop()
            loop.call_soon(protect, lambda: self._call_some(protect))
        for watcher in ready:
            if watcher in self._all:  # otherwise it has ended meanwhile
                watcher.callback()
