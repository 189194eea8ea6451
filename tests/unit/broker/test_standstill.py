"""After a standstill, a broker sends no answer before it has verified its bundles."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from support import settle

from magnetar.broker.ownership.standstill import STILL_S, TICK_S, VERIFY_S, Standstill
from magnetar.metadata.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import pytest


class Loop:
    """The clock of the loop. A test lets the clock jump, as if the process had been stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop = asyncio.get_running_loop()
        self._time: Callable[[], float] = self._loop.time
        self._lost_s = 0.0
        monkeypatch.setattr(self._loop, "time", lambda: self._time() + self._lost_s)

    def stop_for(self, seconds: float) -> None:
        self._lost_s += seconds


class Records:
    """The records that `verify` reads."""

    def __init__(self) -> None:
        self.asked = 0
        self.readable = asyncio.Event()
        self.readable.set()
        self.failures = 0  # the number of coming reads that fail

    async def verify(self) -> None:
        self.asked += 1
        if self.failures:
            self.failures -= 1
            raise Unavailable("the store is restarting")
        await self.readable.wait()


@asynccontextmanager
async def watched() -> AsyncIterator[tuple[Standstill, Records]]:
    records = Records()
    standstill = Standstill(records.verify)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(standstill.run())
        await settle()
        yield standstill, records
        running.cancel()


async def test_a_running_loop_is_no_standstill() -> None:
    async with watched() as (standstill, records):
        await asyncio.sleep(60.0)
        assert standstill.sure
        assert records.asked == 0


async def test_a_broker_that_stood_still_is_not_sure_until_it_has_verified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop(monkeypatch)
    async with watched() as (standstill, records):
        records.readable.clear()
        loop.stop_for(STILL_S + TICK_S + 0.01)
        await asyncio.sleep(TICK_S)
        assert not standstill.sure
        records.readable.set()
        await standstill.wait_sure()
        assert records.asked == 1
        assert standstill.count == 1


async def test_a_short_standstill_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    async with watched() as (standstill, records):
        loop.stop_for(STILL_S - TICK_S)
        await asyncio.sleep(1.0)
        assert standstill.sure
        assert records.asked == 0


async def test_a_store_that_fails_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    async with watched() as (standstill, records):
        records.failures = 5
        loop.stop_for(10.0)
        await asyncio.sleep(TICK_S + 0.2)
        assert not standstill.sure
        await standstill.wait_sure()
        assert records.asked == 6


async def test_without_the_store_the_broker_continues_after_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop(monkeypatch)
    async with watched() as (standstill, records):
        records.readable.clear()
        loop.stop_for(10.0)
        await asyncio.sleep(TICK_S)
        assert not standstill.sure
        await asyncio.sleep(VERIFY_S + 0.1)
        assert standstill.sure


async def test_a_broker_that_stops_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    async with watched() as (standstill, records):
        records.readable.clear()
        loop.stop_for(10.0)
        await asyncio.sleep(TICK_S)
        assert not standstill.sure
    await standstill.wait_sure()
    assert standstill.sure
