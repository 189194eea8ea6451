"""Opening a store: is all of it there? Found damaged, or in the child process that tries it first.

What RocksDB does not see is looked for first (manifest.py). Opening RocksDB holds the interpreter's
lock, and on damaged files it may never return, or end the
process. After an unclean end the opening is therefore tried in a child process first (probe.py),
with a deadline. The child compares the store with the watermark before it lets RocksDB write to it;
then it also does the replaying, so that the opening here is short.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from magnetar.bookie.errors import (
    DamagedStore,
    DirectoryUnusable,
    StorageFailed,
    WrongIncarnation,
)
from magnetar.bookie.storage.format import FormatDamaged, is_incarnation
from magnetar.bookie.storage.layout import STORE, WATERMARK, environment_error, unusable
from magnetar.bookie.storage.manifest import find_damage
from magnetar.bookie.storage.probe import DAMAGED, check_sequence
from magnetar.bookie.storage.rocks import RocksStorage
from magnetar.bookie.storage.watermark import read_watermark
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from pathlib import Path

    from magnetar.bookie.storage.format import Identity, Watermark

log = get_logger(__name__)

# Replaying what eight memtables of 64 MiB hold took 0.6 s per 100 MB when measured: 3 s, and it is
# done twice. A slow disk may take ten times as long.
OPEN_DEADLINE_S: Final = 60.0

# Someone's decision, or the kernel's when memory was short: nothing that the store did.
_KILLED: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


async def open_whole(path: Path, identity: Identity, deadline_s: float) -> RocksStorage:
    """Open the store of a directory in use.

    Raises DamagedStore; DirectoryUnusable when the trouble is not the store's; WrongIncarnation
    when it is the store of another incarnation.
    """
    mark = _read_mark(path, identity)
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


async def probe(path: Path, *arguments: str | Path, deadline_s: float) -> str | None:
    """Run probe.py. Returns what is wrong with the store, None: nothing. Raises DirectoryUnusable
    when someone killed it, or it failed for a reason of its own."""
    command = [sys.executable, "-m", "magnetar.bookie.storage.probe", *map(str, arguments)]
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(deadline_s):
            _, said = await child.communicate()
    except TimeoutError:
        return f"it has not opened within {deadline_s:g} s"
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    status = child.returncode
    if status == 0:
        return None
    if status is not None and -status in _KILLED:
        raise DirectoryUnusable(
            path,
            found=f"that {signal.Signals(-status).name} ended the process that tried the store",
            expected="it to end by itself",
            remedy="Nothing was changed. If memory was short, free some; then start again.",
        )
    reason = said.decode(errors="replace").strip().rpartition("\n")[2]
    if status is not None and status > 0 and status != DAMAGED:
        raise DirectoryUnusable(
            path,
            found=f"that the process that tried the store ended with status {status}: {reason}",
            expected="it to say whether the store is damaged",
            remedy="Nothing was changed. If the installation or its memory limit is to blame, "
            "correct that; then start again.",
        )
    return reason or f"the process that tried it ended with status {status}"


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
