"""Group commit: many writes, one sync, then all their acknowledgements.

Theory. Writers write at once (`GroupCommit.write`), on the loop, and so belong to the group that
is filling. One task closes that group, syncs on a thread of its own, and then calls whoever waits
for the group. While a sync runs the next group fills: a busy disk makes large groups, an idle one
makes groups of one, and nobody ever waits for a timer.

RocksDB stops a write that it has no room for, and with it the whole loop. So after each sync the
store is asked how much it has to do in the background, and before it is too much writers wait
(`wait_room`), and at last are refused (`overloaded`).

Invariants:
    1. A `done` given to `when_durable` is called only after a sync that began after everything
       written before the call, and after its sequence was noted in the watermark.
    2. Once a write or a sync has failed, nothing is written, synced or acknowledged any more: what
       is on disk is unknown, and syncing again could succeed without having written anything (the
       kernel drops the pages of a failed sync). The process is to die.
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

# What a deletion counts as pending: its keys, roughly. That it is above 0 is what matters.
DELETION_BYTES: Final = 64
# How soon it is seen that the store keeps up again: a flush of 64 MiB takes a quarter of a second.
PRESSURE_LOOK_S: Final = 0.05
# Then adds are refused: sooner than a writer gives them up (5 s), so that it learns why.
HELD_S_MAX: Final = 2.0


@dataclass(slots=True)
class _Group:
    bytes: int = 0
    waiting: list[Callable[[], None]] = field(default_factory=list)


class GroupCommit:
    """The only writer of a bookie's store. `run` must be running for anything to become durable."""

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
        """`note_durable` and the syncs run on `thread`, in turn. `die` ends the
        process (in tests it may return). `observe_sync` is told of each sync's
        seconds."""
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
        self._held_since: float | None = None  # in loop time; None: the store keeps up

    @property
    def overloaded(self) -> bool:
        """The store has not kept up for so long that adds are refused rather than held back."""
        if self._held_since is None:
            return False
        return asyncio.get_running_loop().time() - self._held_since >= HELD_S_MAX

    @property
    def pending_bytes(self) -> int:
        """Written and not yet synced."""
        return self._filling.bytes + self._syncing_bytes

    def write(self, puts: Sequence[Put]) -> None:
        """Write now, in order; a batch ends with the put that reaches BATCH_BYTES_MAX. Visible on
        return.

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
        """See Storage. Gone at once, durably so later. Raises as `write` does."""
        self._do(partial(self._storage.delete_ledger, ledger, tombstone), DELETION_BYTES)

    def delete_tombstones(self, ledgers: Sequence[int]) -> None:
        self._do(partial(self._storage.delete_tombstones, ledgers), DELETION_BYTES)

    def when_durable(self, done: Callable[[], None]) -> None:
        """Call `done`, on the loop, once everything written so far is durable; never on failure."""
        self._filling.waiting.append(done)
        self._wake.set()

    async def wait_durable(self) -> None:
        """Return when everything written so far is durable; never, when the sync fails.

        Raises StorageFailed when something has failed already.
        """
        if self._failure is not None:
            raise self._failure
        durable = asyncio.Event()
        self.when_durable(durable.set)
        await durable.wait()

    async def wait_room(self) -> None:
        """Return when fewer than `pending_bytes_max` bytes are pending. Raises StorageFailed."""
        while self._failure is None and self._is_full():
            self._room.clear()
            await self._room.wait()
        if self._failure is not None:
            raise self._failure

    async def run(self) -> None:
        """Commit groups until cancelled. Raises StorageFailed, after `die` was called."""
        while True:
            await self._wait_work()
            if self._failure is not None:
                break
            group, self._filling = self._filling, _Group()
            self._syncing_bytes = group.bytes
            try:
                work = partial(self._sync, self._storage.sequence())
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

    def _note_pressure(self, pressed: bool) -> None:
        if pressed and self._held_since is None:
            self._held_since = asyncio.get_running_loop().time()
            log.warning("store does not keep up: adds are held back")
        elif not pressed and self._held_since is not None:
            self._held_since = None
            log.info("store keeps up again")
        self._room.set()

    def _sync(self, sequence: int) -> tuple[bool, float]:
        """On the sync thread: `sequence` was read before, so the sync covers it. Returns whether
        adds are to be held back, and how many seconds the sync took."""
        begun_s = time.perf_counter()
        self._storage.sync()
        seconds = time.perf_counter() - begun_s
        self._note_durable(sequence)
        return self._pressed(), seconds

    def _pressed(self) -> bool:
        with suppress(StorageFailed):  # the next write says what that means
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
