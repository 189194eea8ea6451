"""Drains bookies, and removes them permanently.

A drained bookie continues to serve but gets no new ledgers. Brokers regularly check their open
ledgers, also those of idle topics. If enough other bookies are available, a broker replaces an open
ledger on the bookie by a new ledger. The ledgers of a decommissioned bookie also get
under-replication records, so that replicators move them. The bookie is the best source for the
copies, so it stays up until it holds no ledger. For a ledger that is being written, the
decommission waits for the writer. The writer leaves the bookie when the writer begins a new ledger.
If the bookie stops, the writer replaces it in the ensemble once an entry is in flight. At the end
the decommission removes the bookie's cookie. The cluster then has no bookie of that name, and the
bookie refuses to start on its old directory (CookieMissing). Each step can be interrupted and
repeated.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from magnetar.bookie.repair.census import READS_AT_ONCE, all_ledgers, read_ledgers
from magnetar.bookie.repair.errors import NoSuchBookie, StillNeeded
from magnetar.bookie.repair.pace import Pace
from magnetar.bookie.repair.survey import SCAN_LEDGERS_PER_S, read_cluster
from magnetar.bookie.repair.under_replication_records import UnderReplicationRecords
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_bookie_drain, encode_bookie_drain
from magnetar.metadata.errors import (
    InvalidRecord,
    MetadataError,
    OutcomeUnknown,
    Unavailable,
)
from magnetar.metadata.model import LedgerId, LedgerState
from magnetar.metadata.store import DELETE, KEEP, Verdict, update
from magnetar.metadata.under_replication import BookieDrain
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from magnetar.bookie.repair.census import Found
    from magnetar.metadata.model import BookieId, LedgerMetadata
    from magnetar.metadata.store import MetadataStore
    from magnetar.runtime.clock import Clock

log = get_logger(__name__)

LOOK_S: Final = 2.0
"""The pause between checks of the remaining ledgers, and after an error of the metadata store."""

UNCHECKED: Final = "not all checks of its ledgers and of the bookie ended"

CHANGE_S: Final = 10.0
"""Time limit of one change of metadata."""


class Stage(Enum):
    MOVING = auto()  # the bookie still holds ledgers
    SERVING = auto()  # the bookie holds nothing but still runs: the operator must stop it
    REMOVED = auto()


@dataclass(frozen=True, slots=True)
class Progress:
    stage: Stage
    blockers: Mapping[int, str]  # the ledgers that the bookie holds or may hold, with the reasons


async def drain(
    store: MetadataStore, clock: Clock, bookie: BookieId, *, decommission: bool
) -> None:
    """Give the bookie no new ledgers; with `decommission`, also have its ledgers moved away. Raises
    NoSuchBookie, NoSuchCluster, and the errors of the metadata store."""
    await _check_known(store, bookie)

    def change(value: bytes | None) -> bytes | Verdict:
        before = None if value is None else decode_bookie_drain(value)
        if before is not None and before.decommission >= decommission:
            return KEEP
        fresh = BookieDrain(bookie, clock.now_ms(), decommission=decommission)
        return encode_bookie_drain(
            fresh if before is None else replace(fresh, unknown=before.unknown)
        )

    await update(store, paths.bookie_draining(bookie), change, deadline=_deadline())


async def undrain(store: MetadataStore, bookie: BookieId) -> None:
    """Let the bookie get new ledgers again. Ledgers that were moved away do not return. Raises the
    errors of `drain`."""
    await _check_known(store, bookie)
    await update(store, paths.bookie_draining(bookie), lambda _: DELETE, deadline=_deadline())


async def decommission(
    store: MetadataStore,
    clock: Clock,
    bookie: BookieId,
    *,
    timeout_s: float,
    on_progress: Callable[[Progress], None],
) -> None:
    """Move all ledgers away from the bookie and remove it from the cluster.

    `on_progress` is called after each change. Raises StillNeeded after `timeout_s`; replicators
    continue to move the bookie's ledgers afterwards. Raises the errors of `drain`; Unavailable and
    OutcomeUnknown only before the work begins.
    """
    await drain(store, clock, bookie, decommission=True)
    leaving = _Leaving(store, UnderReplicationRecords(store, clock), bookie, on_progress)
    try:
        async with asyncio.timeout(timeout_s):
            await leaving.run()
    except TimeoutError:
        raise StillNeeded(bookie, leaving.blockers, leaving.reason) from None


class _Leaving:
    def __init__(
        self,
        store: MetadataStore,
        under_replication: UnderReplicationRecords,
        bookie: BookieId,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.blockers: dict[int, str] = {}  # see `Progress`
        self.reason = UNCHECKED  # why the bookie is not removed if there are no blockers
        self._store = store
        self._under_replication = under_replication
        self._bookie = bookie
        self._on_progress = on_progress
        self._told: Progress | None = None

    async def run(self) -> None:
        """Run to the end. A temporary failure of the metadata store does not end work that takes
        hours."""
        while True:
            try:
                if await self._leave():
                    return
            except (Unavailable, OutcomeUnknown) as error:
                log.warning("decommission waits", bookie=self._bookie, error=str(error))
            await asyncio.sleep(LOOK_S)

    async def _leave(self) -> bool:
        """Move all ledgers, then remove the bookie. False: it still runs, or its cookie changed."""
        cookie = await self._cookie()
        await self._move_all()
        if await self._serves():
            self.reason = "it still served at the last check"
            self._tell(Stage.SERVING)
            return False
        self.reason = UNCHECKED
        # The bookie is not registered any more, and held nothing. A writer may have placed a ledger
        # on it just before the writer saw the drain record, so check all ledgers a second time.
        await self._move_all()
        if not await self._remove_cookie(cookie):
            self.reason = "its cookie changed during the last check, so it was still running"
            return False
        self.reason = "only its drain record is left"
        path = paths.bookie_draining(self._bookie)
        await update(self._store, path, lambda _: DELETE, deadline=_deadline())
        self._tell(Stage.REMOVED)
        return True

    async def _cookie(self) -> bytes | None:
        path = paths.bookie_cookie(self._bookie)
        await self._store.sync(path)
        stored = await self._store.get(path)
        return None if stored is None else stored.value

    async def _remove_cookie(self, seen: bytes | None) -> bool:
        """Remove the cookie if its value is still `seen`. False: the bookie ran after `seen` was
        read. A bookie changes its cookie first at each start, and then each hour (`EPOCH_S`)."""
        path = paths.bookie_cookie(self._bookie)

        def change(value: bytes | None) -> Verdict:
            return DELETE if value == seen else KEEP

        return await update(self._store, path, change, deadline=_deadline()) is None

    async def _move_all(self) -> None:
        """Record the bookie's ledgers for repair, until no ledger names the bookie."""
        while True:
            found: dict[int, str] = {}
            async for batch in all_ledgers(self._store, Pace(SCAN_LEDGERS_PER_S)):
                found |= await self._blockers_of(batch)
            self.blockers = found
            if not found:
                return
            while self.blockers:
                self._tell(Stage.MOVING)
                await asyncio.sleep(LOOK_S)
                left, found = list(map(LedgerId, self.blockers)), {}
                for at in range(0, len(left), READS_AT_ONCE):
                    batch = await read_ledgers(self._store, left[at : at + READS_AT_ONCE])
                    found |= await self._blockers_of(batch)
                self.blockers = found

    async def _blockers_of(self, batch: Sequence[Found]) -> dict[int, str]:
        """Record the ledgers on the bookie for repair, all of them at once, so pass only a few.
        Returns the reason why each of them still waits."""
        blockers: dict[int, str] = {}
        failures: list[MetadataError] = []

        async def record(ledger: LedgerId, metadata: LedgerMetadata) -> None:
            try:
                blockers[ledger] = await self._record(metadata)
            except InvalidRecord:
                blockers[ledger] = "its under-replication record cannot be read"
            except MetadataError as error:
                failures.append(error)

        async with asyncio.TaskGroup() as group:
            for ledger, metadata in batch:
                if metadata is None:
                    blockers[ledger] = "its metadata cannot be read"
                elif self._is_on(metadata):
                    group.create_task(record(ledger, metadata))
        if failures:
            raise failures[0]
        return dict(sorted(blockers.items()))

    async def _record(self, metadata: LedgerMetadata) -> str:
        ledger = metadata.ledger
        members = {member for part in metadata.segments for member in part.members}
        await self._under_replication.add_lost(
            ledger, {member for member in members if member.bookie == self._bookie}
        )
        if any(member.bookie == self._bookie for member in metadata.last_segment.members):
            if metadata.state is LedgerState.OPEN:
                return "it is being written until the writer begins a new ledger on other bookies"
            if metadata.state is LedgerState.IN_RECOVERY:
                return "its recovery is not finished"
        if await self._under_replication.locked(ledger):
            return "it is locked by a repair, or while a left-over copy of it is deleted"
        record = await self._under_replication.get(ledger)
        failure = "" if record is None else record.faults.failure
        if await self._store.get(paths.REPAIR_PAUSED) is not None:
            return "repair is paused: `magnetar bookies repair resume`"
        return failure or "it waits for a replicator"

    def _is_on(self, metadata: LedgerMetadata) -> bool:
        return any(
            member.bookie == self._bookie for part in metadata.segments for member in part.members
        )

    async def _serves(self) -> bool:
        path = paths.bookie_available(self._bookie)
        await self._store.sync(path)
        return await self._store.get(path) is not None

    def _tell(self, stage: Stage) -> None:
        progress = Progress(stage, dict(self.blockers))
        if progress != self._told:
            self._told = progress
            self._on_progress(progress)


async def _check_known(store: MetadataStore, bookie: BookieId) -> None:
    cluster = await read_cluster(store)
    known = {*cluster.cookies, *(member.bookie for member in cluster.listed)}
    if bookie not in known:
        raise NoSuchBookie(bookie, known)


def _deadline() -> float:
    return asyncio.get_running_loop().time() + CHANGE_S
