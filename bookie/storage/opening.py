"""Opening a store: is all of it there? Found damaged, or in the child process that tries it first.

What RocksDB does not see is looked for first (manifest.py). Opening RocksDB holds the interpreter's
lock, and on damaged files it may never return, or end the
process. After an unclean end the opening is therefore tried in a child process first (probe.py),
with a deadline. The child compares the store with the watermark before it lets RocksDB write to it;
then it also does the replaying, so that the opening here is short.

To replace a store that is sound costs all of its copies, so a child that comes to no end does not
speak against the store by itself: a disk may be slow, a machine short of memory. The store is to
blame for one that computes without reading or writing anything, and for one that crashes where
there is memory enough.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from magnetar.bookie.errors import (
    DamagedStore,
    DirectoryUnusable,
    OpenTooSlow,
    StorageFailed,
    WrongIncarnation,
)
from magnetar.bookie.storage.format import FormatDamaged, is_incarnation
from magnetar.bookie.storage.layout import STORE, WATERMARK, environment_error, unusable
from magnetar.bookie.storage.manifest import find_damage
from magnetar.bookie.storage.probe import DAMAGED, check_sequence
from magnetar.bookie.storage.rocks import RocksStorage
from magnetar.bookie.storage.rot import noted_rot
from magnetar.bookie.storage.watermark import read_watermark
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from magnetar.bookie.storage.format import Identity, Watermark

log = get_logger(__name__)

# Replaying what eight memtables of 64 MiB hold took 0.6 s per 100 MB when measured: 3 s, and it is
# done twice. A slow disk may take ten times as long.
OPEN_DEADLINE_S: Final = 60.0

# Of the second half of the deadline, without a byte read or written. Replaying reads a log in steps
# of 32 KiB, each of which takes less than a millisecond.
SPINNING_SHARE: Final = 0.1

# Someone's decision, or the kernel's when memory was short: nothing that the store did.
_KILLED: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


async def open_whole(path: Path, identity: Identity, deadline_s: float) -> RocksStorage:
    """Open the store of a directory in use.

    Raises DamagedStore; DirectoryUnusable, OpenTooSlow when the trouble is not the store's;
    WrongIncarnation when it is the store of another incarnation.
    """
    mark = _read_mark(path, identity)
    rot = noted_rot(path, identity.incarnation)
    if rot is not None:
        raise DamagedStore(path, f"a table was found unreadable: {rot}")
    try:
        damage = find_damage(path / STORE, mark)
    except OSError as error:
        raise _refused(path, str(error)) from error
    if damage:
        raise DamagedStore(path, damage)
    if not mark.closed:
        log.info("store was not closed in good order: replaying its log", directory=str(path))
        reason = await probe(path, "whole", path / STORE, str(mark.sequence), deadline_s=deadline_s)
        if reason is not None:
            raise _refused(path, reason)
    try:
        storage = RocksStorage(path / STORE, create=False)
    except StorageFailed as error:
        raise _refused(path, error.reason) from error
    try:
        check_sequence(storage.sequence(), mark.sequence)
        _check_owner(path, storage.owner(), identity)
    except BaseException as error:
        with suppress(StorageFailed):
            storage.close()
        if isinstance(error, StorageFailed):
            raise _refused(path, error.reason) from error
        raise
    return storage


async def probe(
    path: Path,
    *arguments: str | Path,
    deadline_s: float,
    spinning_share: float = SPINNING_SHARE,
) -> str | None:
    """Run probe.py. Returns what is wrong with the store, None: nothing. Raises DirectoryUnusable
    when someone killed it, or it failed for a reason of its own; OpenTooSlow."""
    status, reason = await _run_probe(path, arguments, deadline_s, spinning_share)
    if status == 0:
        return None
    if status == DAMAGED:
        return reason
    if status > 0:
        raise DirectoryUnusable(
            path,
            found=f"that the process that tried the store ended with status {status}: {reason}",
            expected="it to say whether the store is damaged",
            remedy="Nothing was changed. If the installation or its memory limit is to blame, "
            "correct that; then start again.",
        )
    if -status in _KILLED or arguments[0] == "means":
        raise DirectoryUnusable(
            path,
            found=f"that {signal.Signals(-status).name} ended the process that tried the store",
            expected="it to end by itself",
            remedy="Nothing was changed. If memory was short, free some; then start again.",
        )
    # RocksDB crashes when it gets no memory, too.
    await probe(path, "means", deadline_s=deadline_s)
    return reason or f"the process that tried it ended with status {status}"


async def _run_probe(
    path: Path, arguments: tuple[str | Path, ...], deadline_s: float, spinning_share: float
) -> tuple[int, str]:
    """Its exit status, and the last line of what it said. Raises OpenTooSlow."""
    command = [sys.executable, "-m", "magnetar.bookie.storage.probe", *map(str, arguments)]
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.TaskGroup() as group:
            talking = group.create_task(child.communicate())
            await asyncio.wait({talking}, timeout=deadline_s / 2)
            before = effort_of(child.pid)
            await asyncio.wait({talking}, timeout=deadline_s / 2)
            late, after = not talking.done(), effort_of(child.pid)
            if late:
                child.kill()  # which ends the talking as well
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        status = await child.wait()
    if late:
        if after.spins_since(before, deadline_s / 2, share=spinning_share):
            return DAMAGED, f"opening it computes for {deadline_s:g} s and comes to no end"
        raise _too_slow(path, deadline_s)
    return status, talking.result()[1].decode(errors="replace").strip().rpartition("\n")[2]


class Effort(NamedTuple):
    """What a process has done so far."""

    cpu_s: float
    bytes: int  # read and written, from wherever; -1: unknown

    def spins_since(self, before: Effort, seconds: float, *, share: float = SPINNING_SHARE) -> bool:
        """Whether it did nothing but compute since `before`, so many seconds ago."""
        return self.bytes == before.bytes and (self.cpu_s - before.cpu_s >= share * seconds)


def effort_of(process: int) -> Effort:
    try:
        of = Path(f"/proc/{process}")
        moved = dict(line.split(": ") for line in (of / "io").read_text().splitlines())
        times = (of / "stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return Effort(0.0, -1)
    cpu_s = sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    return Effort(cpu_s, int(moved["rchar"]) + int(moved["wchar"]))


def _too_slow(path: Path, deadline_s: float) -> OpenTooSlow:
    return OpenTooSlow(
        path,
        found=f"that the store has not opened within {deadline_s:g} s",
        expected="it to have replayed its log by then",
        remedy="Nothing was replaced, and nothing says that the store is damaged: the disk or the "
        "machine is slow. Raise open_deadline_s, then start again.",
    )


def _read_mark(path: Path, identity: Identity) -> Watermark:
    """The parts of a directory in use are all there; returns its watermark."""
    if not (path / STORE).is_dir():
        raise DamagedStore(path, "the store is gone")
    try:
        mark = read_watermark(path / WATERMARK)
    except (FormatDamaged, StorageFailed) as error:
        raise _refused(path, f"the watermark is damaged ({error})") from error
    if mark is None:
        raise DamagedStore(path, "the watermark is gone")
    if mark.boot_epoch > identity.boot_epoch:
        raise DamagedStore(
            path,
            f"the watermark is of boot epoch {mark.boot_epoch}, the identity of "
            f"{identity.boot_epoch}",
        )
    return mark


def _check_owner(path: Path, owner: bytes | None, identity: Identity) -> None:
    text = (owner or b"none").decode(errors="replace")
    if text == identity.incarnation:
        return
    if not is_incarnation(text):
        raise DamagedStore(path, f"the store belongs to {text!r}")
    raise WrongIncarnation(
        path,
        found=f"a store of incarnation {text}",
        expected=f"one of incarnation {identity.incarnation}, as the identity file says",
        remedy="The store was copied from elsewhere; put the right one back.",
    )


def _refused(path: Path, reason: str) -> DamagedStore | DirectoryUnusable:
    """What a failed opening means: the disk or the rights may be to blame, not the store."""
    error = environment_error(reason)
    return (
        DamagedStore(path, f"the store does not open: {reason}")
        if error is None
        else unusable(path, error)
    )
