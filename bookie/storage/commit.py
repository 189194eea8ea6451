"""Group commit: many writes, one sync, then all their acknowledgements.

Theory. Writers write at once (`GroupCommit.write`), on the loop, and so belong to the group that
is filling. One task closes that group, syncs on a thread of its own, and then calls whoever waits
for the group. While a sync runs the next group fills: a busy disk makes large groups, an idle one
makes groups of one, and nobody ever waits for a timer.

Invariants:
    1. A `done` given to `when_durable` is called only after a sync that began after everything
    written
       before the call, and after its sequence was noted in the watermark.
    2. Once a write or a sync has failed, nothing is written, synced or acknowledged any more:
    what is
       on disk is unknown, and syncing again could succeed without having written anything (the
       kernel drops the pages of a failed sync). The process is to die.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.storage.store import BATCH_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from magnetar.bookie.storage.store import Put, Storage


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
        thread: Executor,
        die: Callable[[StorageFailed], None],
        pending_bytes_max: int,
        observe_sync: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        """`note_durable` and the syncs run on `thread`, which has one worker. `die` ends the
        process (in tests it may return). `observe_sync` is told of each sync's seconds and
        bytes."""
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
        while self._failure is None and self.pending_bytes >= self._pending_bytes_max:
            self._room.clear()
            await self._room.wait()
        if self._failure is not None:
            raise self._failure

    async def run(self) -> None:
        """Commit groups until cancelled. Raises StorageFailed, after `die` was called."""
        loop = asyncio.get_running_loop()
        while self._failure is None:
            await self._wake.wait()
            self._wake.clear()
            group, self._filling = self._filling, _Group()
            self._syncing_bytes = group.bytes
            begun_s = loop.time()
            try:
                await loop.run_in_executor(self._thread, self._sync, self._storage.sequence())
            except StorageFailed as error:
                self._fail(error)
                raise
            self._syncing_bytes = 0
            self._room.set()
            self._observe_sync(loop.time() - begun_s)
            for done in group.waiting:
                done()

    def _sync(self, sequence: int) -> None:
        """On the sync thread: `sequence` was read before, so the sync covers it."""
        self._storage.sync()
        self._note_durable(sequence)

    def _write_batch(self, puts: Sequence[Put], size: int) -> None:
        try:
            self._storage.write(puts)
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
