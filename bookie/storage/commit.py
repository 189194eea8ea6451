"""Group commit: many writes, one sync, then all their acknowledgements.

Theory. `GroupCommit.write` writes at once, on the event loop, and adds the write to the current
group. One task closes the group, syncs the store on a thread, and then calls the waiters of the
group. During the sync, new writes fill the next group. So a busy disk makes large groups, an idle
disk makes groups of one write, and no write waits for a timer.

When RocksDB is too far behind with its background work, it blocks the next write, and with it the
event loop. To prevent this, the task asks the store after a sync, at most once in PRESSURE_AGE_S,
how much background work is pending. Before RocksDB would block, adds are delayed: writers wait
(`wait_room`). While adds are delayed, the task asks after every sync, and every PRESSURE_LOOK_S if
there is nothing to sync. After HELD_S_MAX, the bookie refuses adds (`overloaded`).

Invariants:
    1. The task calls a `done` given to `when_durable` only after a sync that began after all
       earlier writes. Before the call, the watermark has recorded the sequence of these writes.
    2. After a failed write or sync, this module writes, syncs and acknowledges nothing more. The
       state of the disk is unknown, and another sync could succeed without writing (the kernel
       drops the pages of a failed sync). The process must end.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.storage.store import BATCH_BYTES_MAX
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.bookie.storage.store import Put, Storage
    from magnetar.runtime.thread import Worker


log = get_logger(__name__)

# The bytes that a deletion adds to the pending bytes: roughly the size of its keys.
DELETION_BYTES: Final = 64
# While adds are delayed and there is nothing to sync, the time between two questions to the store.
# A flush of 64 MiB takes a quarter of a second.
PRESSURE_LOOK_S: Final = 0.05
# While the store keeps up, the minimum time between two questions to the store. A question costs
# 5 % of the CPU time of a group of one write.
PRESSURE_AGE_S: Final = 0.01
# The time for which the bookie delays adds before it refuses them. A writer gives up after 5 s, so
# the refusal reaches the writer before it gives up.
HELD_S_MAX: Final = 2.0


@dataclass(slots=True)
class _Group:
    bytes: int = 0
    waiting: list[Callable[[], None]] = field(default_factory=list)


class GroupCommit:
    """The only writer of a bookie's store. Writes become durable only while `run` is running."""

    def __init__(
        self,
        storage: Storage,
        *,
        note_durable: Callable[[int], None],
        thread: Worker,
        die: Callable[[StorageFailed], None],
        pending_bytes_max: int,
        observe_sync: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        """On `thread`, GroupCommit syncs the store, then passes the synced sequence to
        `note_durable`. `die` ends the process; in tests it may return. `observe_sync` gets the
        seconds of each sync."""
        self._storage = storage
        self._note_durable = note_durable
        self._thread = thread
        self._die = die
        self._pending_bytes_max = pending_bytes_max
        self._observe_sync = observe_sync
        self._filling = _Group()
        self._syncing_bytes = 0
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._failure: StorageFailed | None = None
        self._held_since: float | None = None  # loop time; None: adds are not delayed
        self._look_at = 0.0  # the loop time from which the store is asked again

    @property
    def overloaded(self) -> bool:
        """True when adds have been delayed for HELD_S_MAX seconds. From then on, the bookie refuses
        adds until the store keeps up again."""
        if self._held_since is None:
            return False
        return asyncio.get_running_loop().time() - self._held_since >= HELD_S_MAX

    @property
    def pending_bytes(self) -> int:
        """The number of bytes that are written but not synced yet."""
        return self._filling.bytes + self._syncing_bytes

    def write(self, puts: Sequence[Put]) -> None:
        """Write the puts now, in order; they are visible on return. The method writes them in
        batches; a batch ends with the put that reaches BATCH_BYTES_MAX.

        Raises StorageFailed, after `die` was called.
        """
        if self._failure is not None:
            raise self._failure
        begin, size = 0, 0
        for end, (key, value) in enumerate(puts, start=1):
            size += len(key) + len(value)
            if size >= BATCH_BYTES_MAX or end == len(puts):
                self._write_batch(puts[begin:end], size)
                begin, size = end, 0

    def delete_ledger(self, ledger: int, tombstone: bytes | None) -> None:
        """Delete the ledger now (`Storage.delete_ledger`); the deletion becomes durable later.
        Raises the errors of `write`."""
        self._do(partial(self._storage.delete_ledger, ledger, tombstone), DELETION_BYTES)

    def delete_tombstones(self, ledgers: Sequence[int]) -> None:
        self._do(partial(self._storage.delete_tombstones, ledgers), DELETION_BYTES)

    def when_durable(self, done: Callable[[], None]) -> None:
        """Call `done` on the event loop when all earlier writes are durable; never after a
        failure."""
        self._filling.waiting.append(done)
        self._wake.set()

    async def wait_durable(self) -> None:
        """Wait until all earlier writes are durable. If the sync fails, the call never returns.

        Raises StorageFailed if a write or sync failed before the call.
        """
        if self._failure is not None:
            raise self._failure
        durable = asyncio.Event()
        self.when_durable(durable.set)
        await durable.wait()

    async def wait_room(self) -> None:
        """Wait while `pending_bytes_max` bytes or more are pending. Also wait while adds are
        delayed because the store is too slow, but not once the bookie refuses them (`overloaded`).
        Raises StorageFailed."""
        while self._failure is None and self._is_full():
            self._room.clear()
            await self._room.wait()
        if self._failure is not None:
            raise self._failure

    async def run(self) -> None:
        """Commit groups until the task is cancelled. Raises StorageFailed, after `die` was
        called."""
        while True:
            await self._wait_work()
            if self._failure is not None:
                break
            group, self._filling = self._filling, _Group()
            self._syncing_bytes = group.bytes
            try:
                work = partial(self._sync, self._storage.sequence(), self._is_look_due())
                pressed, seconds = await self._thread.do(work)
            except StorageFailed as error:
                self._fail(error)
                raise
            self._syncing_bytes = 0
            self._note_pressure(pressed)
            self._observe_sync(seconds)
            for done in group.waiting:
                done()
        raise self._failure

    async def _wait_work(self) -> None:
        while self._held_since is not None and not self._wake.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(PRESSURE_LOOK_S):
                    await self._wake.wait()
                    break
            self._note_pressure(await self._thread.do(self._pressed))
        await self._wake.wait()
        self._wake.clear()

    def _is_full(self) -> bool:
        held = self._held_since is not None and not self.overloaded
        return held or self.pending_bytes >= self._pending_bytes_max

    def _is_look_due(self) -> bool:
        now = asyncio.get_running_loop().time()
        if self._held_since is None and now < self._look_at:
            return False
        self._look_at = now + PRESSURE_AGE_S
        return True

    def _note_pressure(self, pressed: bool | None) -> None:
        """Begin or end the delay of adds. `pressed` None: the store was not asked."""
        if pressed and self._held_since is None:
            self._held_since = asyncio.get_running_loop().time()
            log.warning("store too slow, delaying adds")
        elif pressed is False and self._held_since is not None:
            self._held_since = None
            log.info("store keeps up again")
        self._room.set()

    def _sync(self, sequence: int, looks: bool) -> tuple[bool | None, float]:
        """Sync the store, then record `sequence` in the watermark. The caller read `sequence`
        before the sync, so the sync covers it. Returns whether to delay adds (None: the store was
        not asked), and the seconds of the sync."""
        begun_s = time.perf_counter()
        self._storage.sync()
        seconds = time.perf_counter() - begun_s
        self._note_durable(sequence)
        return self._pressed() if looks else None, seconds

    def _pressed(self) -> bool:
        with suppress(StorageFailed):  # the next write reports the failure
            return self._storage.pressure() >= 1
        return False

    def _write_batch(self, puts: Sequence[Put], size: int) -> None:
        self._do(partial(self._storage.write, puts), size)

    def _do(self, write: Callable[[], None], size: int) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            write()
        except StorageFailed as error:
            self._fail(error)
            raise
        self._filling.bytes += size
        self._wake.set()

    def _fail(self, error: StorageFailed) -> None:
        self._failure = error
        self._die(error)
        self._room.set()
        self._wake.set()
