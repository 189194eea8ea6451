"""A disk that fills up, with invented numbers; the disk reserve, with a real file."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from fakes.bookies import InlineThread, add, last_request, running_bookie

from magnetar.bookie.admission import Intake
from magnetar.bookie.disk import DiskLimits, DiskMonitor, Reserve, Usage, judge
from magnetar.protos.envelope import COPY, RECOVERY, BookieCode

if TYPE_CHECKING:
    from pathlib import Path

ALL, REPAIRS, NONE = Intake.ALL, Intake.REPAIRS, Intake.NONE
LIMITS = DiskLimits(reserve_bytes=10)


@pytest.mark.parametrize(
    ("before", "free", "held", "after"),
    [
        (ALL, 60, True, ALL),
        (ALL, 51, True, ALL),
        (ALL, 50, True, REPAIRS),
        (ALL, 10, True, REPAIRS),
        (ALL, 9, True, NONE),
        (ALL, 19, False, NONE),
        (ALL, 20, False, REPAIRS),
        (REPAIRS, 51, True, REPAIRS),
        (REPAIRS, 99, True, REPAIRS),
        (REPAIRS, 100, True, ALL),
        (REPAIRS, 0, False, NONE),
        (NONE, 15, False, NONE),
        (NONE, 20, False, REPAIRS),
        (NONE, 100, False, ALL),
    ],
)
def test_the_free_space_decides_which_adds_are_admitted(
    before: Intake, free: int, held: bool, after: Intake
) -> None:
    assert judge(before, Usage(1000, free), LIMITS, reserve_held=held) is after


def test_a_small_disk_has_a_small_reserve() -> None:
    assert LIMITS.reserve_of(500) == 5
    assert LIMITS.reserve_of(1 << 40) == 10


async def test_a_full_disk_makes_the_bookie_read_only_until_space_is_free(tmp_path: Path) -> None:
    usage = Usage(100_000, 50_000)
    seen: list[Intake] = []
    reserve = Reserve(tmp_path)
    monitor = DiskMonitor(
        usage=lambda: usage,
        reserve=reserve,
        thread=InlineThread(),
        set_intake=seen.append,
        limits=DiskLimits(reserve_bytes=1000, interval_s=5),
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(monitor.run())
        await asyncio.sleep(6)
        assert seen == [ALL]
        assert (tmp_path / "reserve").stat().st_size == 1000
        usage = Usage(100_000, 4_000)
        await asyncio.sleep(5)
        assert seen.pop() is REPAIRS
        assert reserve.held
        usage = Usage(100_000, 500)
        await asyncio.sleep(5)
        assert seen.pop() is NONE
        assert not reserve.held
        usage = Usage(100_000, 9_000)
        await asyncio.sleep(5)
        assert seen.pop() is REPAIRS
        assert not reserve.held
        usage = Usage(100_000, 10_000)
        await asyncio.sleep(5)
        assert seen.pop() is ALL
        assert reserve.held
        running.cancel()


async def test_a_disk_whose_free_space_is_unknown_changes_nothing(tmp_path: Path) -> None:
    def fail() -> Usage:
        raise OSError(5, "Input/output error")

    seen: list[Intake] = []
    monitor = DiskMonitor(
        usage=fail,
        reserve=Reserve(tmp_path),
        thread=InlineThread(),
        set_intake=seen.append,
        limits=LIMITS,
    )
    await monitor.check()
    assert seen == []


def test_a_failure_to_make_the_reserve_raises_no_error(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path / "nowhere")
    reserve.make(10)
    assert not reserve.held
    reserve.release()


@pytest.mark.real_loop
async def test_a_read_only_bookie_takes_fences_and_repairs_and_reports_read_only() -> None:
    async with running_bookie() as bookie:
        told: list[bool] = []
        service = bookie.service
        service.watch_read_only(told.append)
        writer = await bookie.connect()
        assert await writer.add(add(1, 0)) == [BookieCode.OK]
        service.set_intake(REPAIRS)
        assert service.info().read_only
        for ledger in (1, 2):
            assert await writer.add(add(ledger, 1)) == [BookieCode.READ_ONLY]
        assert (
            await writer.add(add(1, 1, flags=COPY), add(3, 0, flags=RECOVERY))
            == [BookieCode.OK] * 2
        )
        service.set_intake(NONE)
        assert await writer.add(add(1, 2, flags=COPY)) == [BookieCode.READ_ONLY]
        last = await service.last_confirmed(last_request(1, fence=True))
        assert (last.code, last.last_entry) == (BookieCode.OK, 1)
        service.set_intake(ALL)
        assert await writer.add(add(2, 0), add(1, 2)) == [BookieCode.FENCED, BookieCode.OK]
        assert told == [False, True, False]
