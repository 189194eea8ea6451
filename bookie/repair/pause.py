"""Pauses repair of a whole cluster, for maintenance: a record in the metadata store.

While repair is paused no bookie is declared lost, no ledgers are compared, and no copy is begun;
running copies are finished. Under-replication records are still written; replicators act on them
after the pause. Readers still read a damaged entry from its other copies. A pause itself loses no
data, but copies that are lost during the pause are restored only after it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from magnetar.bookie.repair.survey import read_cluster
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_repair_pause, encode_repair_pause
from magnetar.metadata.errors import InvalidRecord, OutcomeUnknown, Unavailable
from magnetar.metadata.store import DELETE, KEEP, Verdict, update
from magnetar.metadata.under_replication import RepairPause
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from magnetar.metadata.store import MetadataStore
    from magnetar.runtime.clock import Clock

log = get_logger(__name__)

RETRY_S: Final = 0.5
"""The pause after a failed read. The store also calls back when it is reachable again."""

CHANGE_S: Final = 10.0
"""Time limit of one change of metadata."""


async def pause(store: MetadataStore, clock: Clock, *, reason: str) -> None:
    """Pause repair, or change the reason of the present pause. Raises NoSuchCluster, InvalidRecord
    for a reason that is too long, and the errors of the metadata store."""
    await read_cluster(store)

    def change(value: bytes | None) -> bytes | Verdict:
        before = None if value is None else decode_repair_pause(value)
        if before is not None and before.reason == reason:
            return KEEP
        if before is None:
            return encode_repair_pause(RepairPause(clock.now_ms(), reason))
        return encode_repair_pause(replace(before, reason=reason))

    await update(store, paths.REPAIR_PAUSED, change, deadline=_deadline())


async def resume(store: MetadataStore) -> None:
    """End the pause. Raises the errors of `pause`."""
    await read_cluster(store)
    await update(store, paths.REPAIR_PAUSED, lambda _: DELETE, deadline=_deadline())


async def paused(store: MetadataStore) -> RepairPause | None:
    """Return the pause. None: repair is not paused. Raises the errors of `pause`."""
    await read_cluster(store)
    stored = await store.get(paths.REPAIR_PAUSED)
    return None if stored is None else decode_repair_pause(stored.value)


class PauseWatch:
    """Follows the pause record. `run` must be running. Repair counts as paused until the first
    read, and while the record is unreadable."""

    def __init__(self, store: MetadataStore, *, on_change: Callable[[], None]) -> None:
        self.paused = True
        self._store = store
        self._on_change = on_change
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Run until cancelled."""
        unwatch = self._store.watch(paths.REPAIR_PAUSED, self._wake.set)
        try:
            while True:
                self._wake.clear()
                try:
                    self._see(await self._look())
                except (Unavailable, OutcomeUnknown) as error:
                    log.warning("repair pause not read", error=str(error))
                    await asyncio.sleep(RETRY_S)
                else:
                    await self._wake.wait()
        finally:
            unwatch()

    async def _look(self) -> bool:
        stored = await self._store.get(paths.REPAIR_PAUSED)
        if stored is None:
            return False
        try:
            found = decode_repair_pause(stored.value)
        except InvalidRecord as error:
            log.error("repair pause unreadable, repair stays paused", error=str(error))
        else:
            log.warning("repair paused by operator", since_ms=found.since_ms, reason=found.reason)
        return True

    def _see(self, is_paused: bool) -> None:
        if is_paused != self.paused:
            self.paused = is_paused
            log.info("repair paused" if is_paused else "repair resumed")
            self._on_change()


def _deadline() -> float:
    return asyncio.get_running_loop().time() + CHANGE_S
