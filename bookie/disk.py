"""Watches how full the disk is, and limits the adds that the bookie admits.

Theory. At `full` the bookie refuses ordinary adds and reports this in its registration, so writers
choose other bookies. It still accepts what repairs the cluster or frees space: fences, adds of
recoverers and replicators, deletions. It accepts all adds again once usage falls to `resume`.

Other processes may use the space above `full`. So the bookie holds a reserve in the data directory:
a file of zeros. When the free space falls below the reserve's size, the bookie refuses repairs too
and removes the file. The freed space is for the records of fences and deletions, and for the
compactions that reclaim deleted data. It is also for opening the store after a crash, which writes
the log's contents to tables. The bookie creates the reserve again when it accepts all adds again.
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

# The largest share of the disk for the reserve, so that it does not fill a small disk.
RESERVE_SHARE_MAX: Final = 0.01


class Usage(NamedTuple):
    total: int
    free: int  # available to this user


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLimits:
    """Shares of the disk in use. 0 < resume <= full <= 1, and 0 < warn <= full."""

    full: float = 0.95
    warn: float = 0.90
    resume: float = 0.90
    # A look costs microseconds. At 270 MB/s a bookie fills the last 5 % of a 54 GB disk in 10 s.
    interval_s: float = 1.0
    reserve_bytes: int = 16 << 20  # the records of 200,000 fences, the log and the tables

    def __post_init__(self) -> None:
        assert 0 < self.resume <= self.full <= 1, (self.resume, self.full)
        assert 0 < self.warn <= self.full, (self.warn, self.full)

    def reserve_of(self, total: int) -> int:
        return min(self.reserve_bytes, int(total * RESERVE_SHARE_MAX))


def judge(before: Intake, usage: Usage, limits: DiskLimits, *, reserve_held: bool) -> Intake:
    """Return the adds to admit now. Intake.NONE: the free space is smaller than the reserve, or
    than twice the reserve if its file must still be created."""
    reserve = limits.reserve_of(usage.total)
    if usage.free - (0 if reserve_held else reserve) < reserve:
        return Intake.NONE
    used = 1 - usage.free / usage.total
    limit = limits.full if before is Intake.ALL else limits.resume
    if used >= limits.full or used > limit:
        return Intake.REPAIRS
    return Intake.ALL


class Reserve:
    """The reserve file. Its methods block as long as the file system takes."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / RESERVE
        self._new = directory / RESERVE_NEW

    @property
    def held(self) -> bool:
        return self._path.exists()

    def make(self, size: int) -> None:
        """Create the file. Does nothing when it exists or cannot be created."""
        if self.held or size <= 0:
            return
        try:
            with open(self._new, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
            os.replace(self._new, self._path)
        except OSError as error:
            log.warning("disk reserve not created", bytes=size, error=str(error))
            with suppress(OSError):
                self._new.unlink()

    def release(self) -> None:
        with suppress(FileNotFoundError):
            self._path.unlink()


def usage_of(directory: Path) -> Usage:
    """Return the usage of the directory's disk. Raises OSError."""
    found = shutil.disk_usage(directory)
    return Usage(found.total, found.free)


def release_if_short(directory: Path, limits: DiskLimits) -> None:
    """Release the reserve before the store is opened, because opening needs space."""
    if not directory.exists():
        return
    try:
        usage = usage_of(directory)
        if usage.free < limits.reserve_of(usage.total):
            Reserve(directory).release()
    except OSError as error:
        log.warning("disk usage unknown", directory=str(directory), error=str(error))


class DiskMonitor:
    """Calls `set_intake` on the loop after each successful look, even without a change."""

    def __init__(
        self,
        *,
        usage: Callable[[], Usage],
        reserve: Reserve,
        thread: Worker,
        set_intake: Callable[[Intake], None],
        limits: DiskLimits,
    ) -> None:
        """`usage` is called on `thread`, as all disk calls are. It may raise OSError."""
        self.usage = Usage(0, 0)  # the last measurement; 0: none yet
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
        """Look now. If the disk's usage is unknown, nothing changes."""
        try:
            found = await self._thread.do(self._look)
        except OSError as error:
            log.error("disk usage unknown", error=str(error))
            return
        self.usage, intake = found
        self._maybe_warn()
        if intake is not self._intake:
            log.warning("disk intake changed", intake=intake.value, free_bytes=self.usage.free)
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
