"""Thousands of watchers of a log are called in slices."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from magnetar.broker.log.position import EARLIEST
from magnetar.broker.log.watchers import CALLED_PER_TURN, Watchers

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.broker.log.watchers import Watcher


def plainly(call: Callable[[], None]) -> None:
    call()


class Calls:
    def __init__(self, number: int) -> None:
        self.watchers = Watchers()
        self.called: list[int] = []
        self.added = [self.add(place) for place in range(number)]

    def add(self, place: int) -> Watcher:
        return self.watchers.add(lambda: self.called.append(place), lambda: EARLIEST)

    async def in_turns(self) -> list[int]:
        """The number of calls in each turn of the loop that has some."""
        found, before = [], 0
        for _ in range(10):
            found.append(len(self.called) - before)
            before = len(self.called)
            await asyncio.sleep(0)
        return [number for number in found if number]


async def test_a_few_watchers_are_called_at_once() -> None:
    it = Calls(3)
    it.added[1].end()
    it.watchers.call(plainly)
    assert it.called == [0, 2]


async def test_thousands_of_watchers_are_called_in_slices_and_in_order() -> None:
    it = Calls(2 * CALLED_PER_TURN + 7)
    it.watchers.call(plainly)
    assert await it.in_turns() == [CALLED_PER_TURN, CALLED_PER_TURN, 7]
    assert it.called == list(range(2 * CALLED_PER_TURN + 7))


async def test_every_watcher_is_called_after_the_last_change() -> None:
    number = 3 * CALLED_PER_TURN
    it = Calls(number)
    it.watchers.call(plainly)
    it.watchers.call(plainly)  # the watchers that still wait are called once
    it.added[-1].end()
    for watcher in it.added[:-5]:
        watcher.end()  # less than a slice is left
    it.watchers.call(plainly)
    await it.in_turns()
    calls = Counter(it.called)
    assert [calls[place] for place in range(number)] == [
        *[1] * CALLED_PER_TURN,
        *[0] * (number - CALLED_PER_TURN - 5),
        *[1] * 4,
        0,
    ]


async def test_a_callback_that_raises_does_not_stop_the_later_slices() -> None:
    it = Calls(2 * CALLED_PER_TURN)

    def bug() -> None:
        raise RuntimeError("a bug")

    it.added[CALLED_PER_TURN - 1].end()
    it.watchers.add(lambda: None, lambda: EARLIEST)
    failing = it.watchers.add(bug, lambda: EARLIEST)
    failures: list[Exception] = []

    def protect(call: Callable[[], None]) -> None:
        try:
            call()
        except RuntimeError as error:
            failures.append(error)

    it.add(-1)
    protect(lambda: it.watchers.call(protect))
    await it.in_turns()
    assert len(failures) == 1
    failing.end()
    it.called.clear()
    it.watchers.call(protect)
    await it.in_turns()
    assert len(it.called) == 2 * CALLED_PER_TURN


@pytest.mark.parametrize("number", [CALLED_PER_TURN, CALLED_PER_TURN + 1])
async def test_watchers_of_one_slice_wait_for_no_turn(number: int) -> None:
    it = Calls(number)
    it.watchers.call(plainly)
    assert len(it.called) == CALLED_PER_TURN
