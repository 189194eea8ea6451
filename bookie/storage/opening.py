"""Opens a store, after a check that nothing of it is missing.

First this module looks for damage that RocksDB does not notice (manifest.py). Opening RocksDB holds
the interpreter's lock. On damaged files it may never return, or may end the process. So after an
unclean end a child process tries the opening first (probe.py), with a deadline. The child compares
the store with the watermark before RocksDB may write to it. Then it also replays the log, so that
the opening in this process is short.

Replacing a sound store costs all of its copies. So a child that does not finish does not prove
damage: the disk may be slow, or memory short. The store counts as damaged if the child computes
without reading or writing, or crashes although there is enough memory.
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

# Replaying a log takes 0.6 s per 100 MB (measured), so 3 s for eight memtables of 64 MiB. The
# child replays the log twice. A slow disk may take ten times as long.
OPEN_DEADLINE_S: Final = 60.0

# The child counts as hanging if it computes for this share of the deadline's second half, and reads
# and writes nothing. Replaying reads a log in steps of 32 KiB, each of which takes less than a
# millisecond.
SPINNING_SHARE: Final = 0.1

# Signals of an operator, or of the kernel when memory is short: not caused by the store.
_KILLED: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


async def open_whole(path: Path, identity: Identity, deadline_s: float) -> RocksStorage:
    """Open the store of a directory in the state *ready*.

    Raises DamagedStore; DirectoryUnusable or OpenTooSlow when nothing indicates damage;
    WrongIncarnation when it is the store of another incarnation.
    """
    watermark = _read_watermark(path, identity)
    rot = noted_rot(path, identity.incarnation)
    if rot is not None:
        raise DamagedStore(path, f"a table is unreadable: {rot}")
    try:
        damage = find_damage(path / STORE, watermark)
    except OSError as error:
        raise _refused(path, str(error)) from error
    if damage:
        raise DamagedStore(path, damage)
    if not watermark.closed:
        log.info("store not closed cleanly; replaying its log", directory=str(path))
        reason = await probe(
            path, "whole", path / STORE, str(watermark.sequence), deadline_s=deadline_s
        )
        if reason is not None:
            raise _refused(path, reason)
    try:
        storage = RocksStorage(path / STORE, create=False)
    except StorageFailed as error:
        raise _refused(path, error.reason) from error
    try:
        check_sequence(storage.sequence(), watermark.sequence)
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
    """Run probe.py. Returns the damage of the store; None: none. Raises DirectoryUnusable when the
    child was killed or failed for another reason, and OpenTooSlow at the deadline, unless the child
    hangs (SPINNING_SHARE)."""
    status, reason = await _run_probe(path, arguments, deadline_s, spinning_share)
    if status == 0:
        return None
    if status == DAMAGED:
        return reason
    if status > 0:
        raise DirectoryUnusable(
            path,
            found=f"a probe process of the store that ended with status {status}: {reason}",
            expected="a result that says whether the store is damaged",
            remedy="Nothing was changed. Check the installation and its memory limit, then start "
            "again.",
        )
    if -status in _KILLED or arguments[0] == "means":
        raise DirectoryUnusable(
            path,
            found="a probe process of the store that was ended by " + signal.Signals(-status).name,
            expected="that it ends by itself",
            remedy="Nothing was changed. If memory was short, free some; then start again.",
        )
    # RocksDB also crashes when it gets no memory. Then this probe raises DirectoryUnusable.
    await probe(path, "means", deadline_s=deadline_s)
    return reason or f"the probe process ended with status {status}"


async def _run_probe(
    path: Path, arguments: tuple[str | Path, ...], deadline_s: float, spinning_share: float
) -> tuple[int, str]:
    """Return the child's exit status and the last line of its output. If the child hangs, return
    DAMAGED and the reason. Raises OpenTooSlow."""
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
                child.kill()  # this also ends `talking`
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        status = await child.wait()
    if late:
        if after.spins_since(before, deadline_s / 2, share=spinning_share):
            return DAMAGED, f"opening it computed for {deadline_s:g} s without an end"
        raise _too_slow(path, deadline_s)
    return status, talking.result()[1].decode(errors="replace").strip().rpartition("\n")[2]


class Effort(NamedTuple):
    """The resources that a process has used so far."""

    cpu_s: float
    bytes: int  # read and written, from and to anything; -1: unknown

    def spins_since(self, before: Effort, seconds: float, *, share: float = SPINNING_SHARE) -> bool:
        """Return whether the process only computed since `before`, `seconds` ago."""
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
        found=f"a store that did not open within {deadline_s:g} s",
        expected="a store with a replayed log by then",
        remedy="Nothing was replaced, and nothing indicates damage: the disk or the machine is "
        "slow. Raise open_deadline_s, then start again.",
    )


def _read_watermark(path: Path, identity: Identity) -> Watermark:
    """Check that the store and its watermark exist; returns the watermark."""
    if not (path / STORE).is_dir():
        raise DamagedStore(path, "the store is missing")
    try:
        watermark = read_watermark(path / WATERMARK)
    except (FormatDamaged, StorageFailed) as error:
        raise _refused(path, f"the watermark is damaged ({error})") from error
    if watermark is None:
        raise DamagedStore(path, "the watermark is missing")
    if watermark.boot_epoch > identity.boot_epoch:
        raise DamagedStore(
            path,
            f"the watermark has boot epoch {watermark.boot_epoch}, the identity "
            f"{identity.boot_epoch}",
        )
    return watermark


def _check_owner(path: Path, owner: bytes | None, identity: Identity) -> None:
    text = (owner or b"none").decode(errors="replace")
    if text == identity.incarnation:
        return
    if not is_incarnation(text):
        raise DamagedStore(path, f"the store belongs to {text!r}")
    raise WrongIncarnation(
        path,
        found=f"a store of incarnation {text}",
        expected=f"one of incarnation {identity.incarnation}, as in the identity file",
        remedy="The store was copied from another bookie; put the right one back.",
    )


def _refused(path: Path, reason: str) -> DamagedStore | DirectoryUnusable:
    """Return the error of a failed opening: the disk or permissions may be the cause, not the
    store."""
    error = environment_error(reason)
    return (
        DamagedStore(path, f"the store does not open: {reason}")
        if error is None
        else unusable(path, error)
    )
