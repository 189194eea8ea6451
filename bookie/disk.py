"""How full the disk is, and what a bookie does about it.

Theory. At `full` the bookie takes no ordinary adds any more and says so in its registration, and
writers go elsewhere. It goes on with what makes the cluster whole and frees space: fences, adds of
recoverers and replicators, deletions. It takes all adds again once usage is down to `resume`.

What is left at `full` is shared with others, so a reserve of its own lies in the data directory as
a file of zeros. When no more than the reserve is left, repairs are refused too, and the file is
removed: its space is for the records of fences and deletions, for the compactions that give back
what is deleted, and for opening the store after an end, which writes anew what the log holds. It is
made again when the bookie takes adds again.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from magnetar.bookie.admission import Intake
from magnetar.bookie.storage.layout import RESERVE, RESERVE_NEW
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from magnetar.runtime.thread import Worker

log = get_logger(__name__)

# Of the disk: on a small one the reserve must not be what fills it.
RESERVE_SHARE_MAX: Final = 0.01


class Usage(NamedTuple):
    total: int
    free: int  # for this user


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLimits:
    """Shares of the disk that are used. 0 < resume <= full <= 1, and 0 < warn <= full."""

    full: float = 0.95
    warn: float = 0.90
    resume: float = 0.90
    # A look costs microseconds; at 270 MB/s a bookie writes in 10 s what would be 5 % of 54 GB.
    interval_s: float = 1.0
    reserve_bytes: int = 16 << 20  # the records of 200,000 fences, log and tables

    def __post_init__(self) -> None:
        assert 0 < self.resume <= self.full <= 1, (self.resume, self.full)
        assert 0 < self.warn <= self.full, (self.warn, self.full)

    def reserve_of(self, total: int) -> int:
        return min(self.reserve_bytes, int(total * RESERVE_SHARE_MAX))


def judge(before: Intake, usage: Usage, limits: DiskLimits, *, reserve_held: bool) -> Intake:
    """What may be let in now. A reserve that is not held is still to be made, of what is free."""
    reserve = limits.reserve_of(usage.total)
    if usage.free - (0 if reserve_held else reserve) < reserve:
        return Intake.NONE
    used = 1 - usage.free / usage.total
    limit = limits.full if before is Intake.ALL else limits.resume
    if used >= limits.full or used > limit:
        return Intake.REPAIRS
    return Intake.ALL


class Reserve:
    """The file. Its methods block for as long as the file system takes."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / RESERVE
        self._new = directory / RESERVE_NEW

    @property
    def held(self) -> bool:
        return self._path.exists()

    def make(self, size: int) -> None:
        """Does nothing when it is there, or cannot be made."""
        if self.held or size <= 0:
            return
        try:
            with open(self._new, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
            os.replace(self._new, self._path)
        except OSError as error:
            log.warning("no reserve on the disk", bytes=size, error=str(error))
            with suppress(OSError):
                self._new.unlink()

    def release(self) -> None:
        with suppress(FileNotFoundError):
            self._path.unlink()


def usage_of(directory: Path) -> Usage:
    """Raises OSError."""
    found = shutil.disk_usage(directory)
    return Usage(found.total, found.free)


def release_if_short(directory: Path, limits: DiskLimits) -> None:
    """Before the store is opened, which needs room."""
    if not directory.exists():
        return
    try:
        usage = usage_of(directory)
        if usage.free < limits.reserve_of(usage.total):
            Reserve(directory).release()
    except OSError as error:
        log.warning("disk usage unknown", directory=str(directory), error=str(error))


class DiskMonitor:
    """`set_intake` is told on the loop, also of what has not changed."""

    def __init__(
        self,
        *,
        usage: Callable[[], Usage],
        reserve: Reserve,
        thread: Worker,
        set_intake: Callable[[Intake], None],
        limits: DiskLimits,
    ) -> None:
        """`usage` may raise OSError, and is called on `thread` as whatever touches the disk."""
        self.usage = Usage(0, 0)  # as seen last; 0: not yet
        self._usage = usage
        self._reserve = reserve
        self._thread = thread
        self._set_intake = set_intake
        self._limits = limits
        self._intake = Intake.ALL
        self._warned = False

    async def run(self) -> None:
        """Look every `interval_s`, until cancelled."""
        while True:
            await asyncio.sleep(self._limits.interval_s)
            await self.check()

    async def check(self) -> None:
        """Look now. A disk that cannot be asked changes nothing."""
        try:
            found = await self._thread.do(self._look)
        except OSError as error:
            log.error("disk usage unknown", error=str(error))
            return
        self.usage, intake = found
        self._maybe_warn()
        if intake is not self._intake:
            log.warning("disk", taken_now=intake.value, free_bytes=self.usage.free)
        self._intake = intake
        self._set_intake(intake)

    def _look(self) -> tuple[Usage, Intake]:
        usage = self._usage()
        held = self._reserve.held
        intake = judge(self._intake, usage, self._limits, reserve_held=held)
        if intake is Intake.NONE and held:
            self._reserve.release()
        elif intake is Intake.ALL and not held:
            self._reserve.make(self._limits.reserve_of(usage.total))
        return usage, intake

    def _maybe_warn(self) -> None:
        used = 1 - self.usage.free / self.usage.total
        if used < self._limits.warn:
            self._warned = False
        elif not self._warned:
            self._warned = True
            log.warning("disk nearly full", used=round(used, 3), full_at=self._limits.full)
