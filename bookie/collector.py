"""Deletes data that the bookie no longer needs.

The collector deletes the entries of deleted ledgers, left-over copies, old tombstones, and the
stores of former incarnations.

Theory. A bookie gets no message about the deletion of a ledger. So the collector compares the
bookie's ledgers with the metadata. Four rules make this safe:

    1. The bookie lists its stored ledgers *first*, and the metadata afterwards. A ledger is in the
       metadata before any bookie stores its first entry. So a stored ledger that the metadata does
       not list was deleted.
    2. The listing only gives candidates. Directly before it deletes a ledger, the bookie looks the
       candidate up again, after a `sync`. Ledger ids are never reused, so a deleted ledger stays
       absent.
    3. The round ends without a deletion when the metadata store is the wrong one, or was restored
       from an old backup. There are three signs of such a store: it belongs to another cluster, it
       never had a ledger, or it has not handed out the id of a ledger that has entries or a
       verified record (`LedgerRecord`) on this bookie. A failed read of the metadata ends the
       round, too. A client can fence an id that was never handed out, and the fence creates an
       unverified record. The bookie keeps such a record, and the round continues.
    4. One write deletes the entries and adds a tombstone. While the bookie keeps the tombstone, it
       tells a writer that is still active that the ledger was deleted.

A copy is *left over* when its ledger is closed and no ensemble names this bookie: another bookie
has replaced it. The collector deletes the copy when it finds the copy left over a second time, at
least `grace_s` after the first time. During this second look it holds the lock that a repair of the
ledger takes. The deletion of a copy writes no tombstone, because the bookie may get a copy again.

A deletion is cheap, but does not free disk space. A later compaction frees the space (`Reclaimer`).
"""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from magnetar.bookie.errors import CollectionAborted, StorageFailed
from magnetar.bookie.ledger.records import LedgerRecords
from magnetar.bookie.repair.pace import Pace
from magnetar.bookie.storage.format import (
    FormatDamaged,
    Tombstone,
    decode_ledger_record,
    decode_tombstone,
    encode_tombstone,
    tombstone_key,
)
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_cluster, decode_ledger, decode_ledger_counter
from magnetar.metadata.errors import InvalidRecord, MetadataError
from magnetar.metadata.ledger_tree import ledger_ids
from magnetar.metadata.model import BookieId, LedgerId, LedgerState, Member
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Sequence
    from random import Random

    from magnetar.bookie.admission import Admission
    from magnetar.bookie.reclaimer import Reclaimer
    from magnetar.bookie.repair.under_replication_records import UnderReplicationRecords
    from magnetar.bookie.storage.commit import GroupCommit
    from magnetar.bookie.storage.format import Identity
    from magnetar.bookie.storage.store import Storage
    from magnetar.metadata.model import LedgerMetadata
    from magnetar.metadata.store import MetadataStore
    from magnetar.runtime.clock import Clock
    from magnetar.runtime.thread import Worker

log = get_logger(__name__)
T = TypeVar("T")

PAGE: Final = 10_000  # ledgers in one page of a listing: a few milliseconds on the read thread
RECORDS_AT_ONCE: Final = 1_000  # records that one call reads: some milliseconds on the read thread
MARKS_PER_STEP: Final = 200  # tombstones marked as reclaimed in one step of the loop: 5 ms
LOOK_TIMEOUT_S: Final = 10.0
LISTING_TIMEOUT_S: Final = 600.0
# Ledgers that one round examines for left-over copies; the next round continues after them. At 200
# lookups/s a round takes 50 s for them.
LOOKS_FOR_COPIES_MAX: Final = 10_000
# If a read of the metadata takes longer than this, the collector no longer trusts its lock. The
# process may have been suspended and have lost the lock, and a repair may have made the copy again.
# The lock lives as long as the metadata session. ZooKeeper's shortest session timeout is 4 s by
# default.
LOCK_BELIEVED_S: Final = 2.0
LEFT_OVER_MAX: Final = 100_000  # copies noted at a first look; more wait for another round


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorConfig:
    """Times in seconds."""

    interval_s: float = 180.0
    grace_s: float = 600.0  # the time between the two looks at a left-over copy
    tombstones_kept_s: float = 7 * 86_400.0
    looks_per_s: float = 200.0  # metadata lookups; each takes up to three requests


@dataclass(slots=True)
class CollectorCounts:
    """Counts since the start of the process."""

    rounds: int = 0  # completed rounds
    aborted: int = 0
    candidates: int = 0  # stored ledgers that the metadata handed out, but did not list
    never_handed_out: int = 0  # records without a ledger, in the last round
    ledgers_deleted: int = 0
    copies_deleted: int = 0
    tombstones_deleted: int = 0
    formers_removed: int = 0
    finished_s: float = 0.0  # end of the last complete round, in loop time; 0: none yet


class Collector:
    """Call `run` once. Listings, reads of ledger records and the removal of stores run on
    `read_thread`; everything else runs on the event loop."""

    def __init__(
        self,
        *,
        identity: Identity,
        storage: Storage,
        commit: GroupCommit,
        admission: Admission,
        metadata: MetadataStore,
        under_replication: UnderReplicationRecords,
        reclaimer: Reclaimer,
        clock: Clock,
        chance: Random,
        read_thread: Worker,
        formers: Collection[str] = (),
        remove_former: Callable[[str], None] = lambda _: None,
        config: CollectorConfig,
        page: int = PAGE,
    ) -> None:
        """`formers`: the former incarnations of the bookie whose stores are kept. `remove_former`
        deletes the store of one incarnation, on the read thread, and may raise OSError."""
        self.counts = CollectorCounts()
        self._identity = identity
        self._member = Member(BookieId(identity.bookie), identity.incarnation)
        self._storage = storage
        self._commit = commit
        self._admission = admission
        self._metadata = metadata
        self._records = LedgerRecords(metadata, timeout_s=LOOK_TIMEOUT_S)
        self._under_replication = under_replication
        self._reclaimer = reclaimer
        self._clock = clock
        self._chance = chance
        self._read_thread = read_thread
        self._formers = formers
        self._remove_former = remove_former
        self._config = config
        self._page = page
        self._pace = Pace(config.looks_per_s)
        self._left_over: dict[int, float] = {}  # ledger -> loop time of the first look
        self._looked_at = -1  # the last ledger that was examined for a left-over copy

    async def run(self) -> None:
        """Run a round every `interval_s`, until cancelled. Raises StorageFailed when a write
        failed."""
        while True:
            await asyncio.sleep(self._config.interval_s * self._chance.uniform(0.9, 1.1))
            await self.maybe_round()

    async def maybe_round(self) -> bool:
        """Run one round. False: the round was aborted, and the reason is logged. Raises
        StorageFailed when a write failed."""
        loop = asyncio.get_running_loop()
        try:
            await self._round()
        except (MetadataError, CollectionAborted, TimeoutError) as error:
            self.counts.aborted += 1
            log.warning("collection aborted", reason=str(error) or "the metadata does not answer")
            return False
        self.counts.rounds += 1
        self.counts.finished_s = loop.time()
        return True

    async def _round(self) -> None:
        await self._reclaim_unreclaimed()
        stored = await self._stored()
        handed_out = await self._check_metadata()
        gone, there = await self._compare(stored)
        gone = await self._handed_out(gone, handed_out)
        self.counts.candidates += len(gone)
        deleted = [ledger for ledger in gone if await self._maybe_delete(ledger)]
        deleted += await self._left_over_copies(there)
        if deleted:
            await self._commit.wait_durable()
        await self._drop_tombstones()
        await self._drop_formers()
        await self._reclaimer.reclaim(sorted(deleted), there)
        await self._note_reclaimed()

    # -- Stored ledgers and the metadata ---------------------------------------------------------

    async def _stored(self) -> array[int]:
        """Return the stored ledgers, ascending; each takes 8 bytes."""
        found: array[int] = array("q")
        while True:
            after = found[-1] if found else -1
            page = await self._read(partial(self._storage.ledgers, after, ledgers_max=self._page))
            found.extend(page)
            if len(page) < self._page:
                return found

    async def _check_metadata(self) -> int:
        """Return the lowest ledger id that the metadata store has not handed out yet. Raises
        CollectionAborted if the metadata belongs to another cluster."""
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            await self._metadata.sync(paths.CLUSTER)
            cluster = await self._metadata.get(paths.CLUSTER)
            counter = await self._metadata.get(paths.NEXT_LEDGER_ID)
        found = None if cluster is None else decode_cluster(cluster.value)
        if found != self._identity.cluster:
            raise CollectionAborted(
                f"the metadata belongs to cluster {found}, this bookie to {self._identity.cluster}"
            )
        return 0 if counter is None else int(decode_ledger_counter(counter.value))

    async def _compare(self, stored: array[int]) -> tuple[list[int], array[int]]:
        """Return the ledgers of `stored` that the metadata does not list, and the ledgers of
        `stored` that it lists. Raises CollectionAborted if ledgers are stored, but the metadata
        never had a ledger."""
        gone: list[int] = []
        there: array[int] = array("q")
        if not stored:
            return gone, there
        at = 0
        async with asyncio.timeout(LISTING_TIMEOUT_S):
            async for ledger in ledger_ids(self._metadata, paths.LEDGERS):
                while at < len(stored) and stored[at] < ledger:
                    gone.append(stored[at])
                    at += 1
                if at < len(stored) and stored[at] == ledger:
                    there.append(ledger)
                    at += 1
        gone.extend(stored[at:])
        if gone and not there and await self._folder_missing():
            raise CollectionAborted("the metadata has no ledgers and never had one")
        return gone, there

    async def _handed_out(self, gone: list[int], end: int) -> list[int]:
        """Return the ledgers of `gone` below `end`, the lowest id that was not handed out yet.
        Raises CollectionAborted if another ledger of `gone` has entries or a verified record on
        this bookie: then the metadata store is the wrong one or old."""
        first = bisect_left(gone, end)
        strangers = gone[first:]
        for begin in range(0, len(strangers), RECORDS_AT_ONCE):
            some = strangers[begin : begin + RECORDS_AT_ONCE]
            written = await self._read(partial(self._first_written, some))
            if written is not None:
                raise CollectionAborted(
                    f"ledger {written} is stored here, but the metadata handed out no id beyond "
                    f"{end - 1}: the metadata store is the wrong one or old"
                )
        self.counts.never_handed_out = len(strangers)
        if strangers:
            log.error(
                "kept records of ledgers whose ids were never handed out; only a fence creates "
                "such a record",
                ledgers=strangers[:10],
                records=len(strangers),
            )
        return gone[:first]

    def _first_written(self, ledgers: Sequence[int]) -> int | None:
        """Return a ledger of `ledgers` that has entries or a verified record. None: each ledger has
        only an unverified record. Runs on the read thread."""
        for ledger in ledgers:
            record = self._storage.ledger_record(ledger)
            try:
                verified = record is not None and decode_ledger_record(record).verified
            except FormatDamaged:
                verified = True  # a damaged record counts as verified
            if verified or self._storage.entry_ids(ledger, 0, entries_max=1):
                return ledger
        return None

    async def _folder_missing(self) -> bool:
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            return await self._metadata.get(paths.LEDGERS) is None

    # -- Deleted ledgers -------------------------------------------------------------------------

    async def _maybe_delete(self, ledger: int) -> bool:
        await self._wait_turn()
        try:
            exists = await self._records.get(LedgerId(ledger)) is not None
        except InvalidRecord:
            exists = True
        if exists:
            log.error("an existing ledger was missing in the metadata's listing", ledger=ledger)
            return False
        self._admission.delete(ledger, for_good=True)
        self._reclaimer.note_dead([ledger])  # noted now, because the round may be aborted later
        self._left_over.pop(ledger, None)
        self.counts.ledgers_deleted += 1
        log.info("ledger deleted", ledger=ledger)
        return True

    # -- Replaced copies -------------------------------------------------------------------------

    async def _left_over_copies(self, there: array[int]) -> list[int]:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        ripe = [
            ledger
            for ledger, since_s in self._left_over.items()
            if began_s - since_s >= self._config.grace_s
        ]
        deleted = [ledger for ledger in ripe if await self._maybe_delete_copy(ledger)]
        begin = bisect_right(there, self._looked_at)
        rota = there[begin : begin + LOOKS_FOR_COPIES_MAX]
        for ledger in rota:
            await self._wait_turn()
            if not self._is_left_over(await self._readable(ledger)):
                self._left_over.pop(ledger, None)
            elif len(self._left_over) < LEFT_OVER_MAX:
                self._left_over.setdefault(ledger, loop.time())
        self._looked_at = rota[-1] if begin + len(rota) < len(there) else -1
        for ledger in deleted:
            self._left_over.pop(ledger, None)
        return deleted

    async def _maybe_delete_copy(self, ledger: int) -> bool:
        """Look at the copy a second time, and delete it if it is still left over. Return whether
        the copy was deleted. The bookie must still hold the ledger's lock after it has read the
        metadata: otherwise a repair may be making this copy again."""
        loop = asyncio.get_running_loop()
        await self._wait_turn()
        owner = f"bookie {self._member.bookie}"
        async with self._under_replication.holding(LedgerId(ledger), owner) as locked:
            if locked is None:
                return False
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                await self._metadata.sync(paths.ledger(LedgerId(ledger)))
            asked_s = loop.time()
            metadata = await self._readable(ledger)
            if not locked() or loop.time() - asked_s > LOCK_BELIEVED_S:
                return False
            if not self._is_left_over(metadata):
                del self._left_over[ledger]
                return False
            self._admission.delete(ledger, for_good=False)
            self._reclaimer.note_dead([ledger])
            await self._commit.wait_durable()
        self.counts.copies_deleted += 1
        log.info("left-over copy deleted", ledger=ledger)
        return True

    async def _readable(self, ledger: int) -> LedgerMetadata | None:
        """Return the ledger's metadata. None: the ledger was deleted, or its metadata cannot be
        read."""
        try:
            return await self._records.get(LedgerId(ledger))
        except InvalidRecord as error:
            log.error("ledger metadata unreadable, copy kept", ledger=ledger, error=str(error))
            return None

    def _is_left_over(self, metadata: LedgerMetadata | None) -> bool:
        return (
            metadata is not None
            and metadata.state is LedgerState.CLOSED
            and not _names(metadata, self._member)
        )

    # -- Tombstones, former incarnations, space ----------------------------------------------------

    async def _tombstones(self) -> AsyncIterator[list[tuple[int, Tombstone]]]:
        """Yield the readable tombstones, one page at a time."""
        after = -1
        while True:
            page = await self._read(
                partial(self._storage.tombstones, after, ledgers_max=self._page)
            )
            found: list[tuple[int, Tombstone]] = []
            for ledger, stone in page:
                try:
                    found.append((ledger, decode_tombstone(stone)))
                except FormatDamaged as damage:
                    log.error("tombstone unreadable", ledger=ledger, reason=damage.reason)
            yield found
            if len(page) < self._page:
                return
            after = page[-1][0]

    async def _drop_tombstones(self) -> None:
        """Delete old tombstones. If the clock jumps forward, the collector deletes tombstones too
        early. The bookie then still refuses a writer's adds to a deleted ledger, because it checks
        the metadata at the first add."""
        oldest_ms = self._clock.now_ms() - self._config.tombstones_kept_s * 1000
        async for page in self._tombstones():
            old = [ledger for ledger, stone in page if stone.deleted_ms < oldest_ms]
            if old:
                self._commit.delete_tombstones(old)
                self.counts.tombstones_deleted += len(old)

    async def _drop_formers(self) -> None:
        for incarnation in list(self._formers):
            if await self.drained(Member(self._member.bookie, incarnation)):
                try:
                    await self._read(partial(self._remove_former, incarnation))
                except OSError as error:
                    log.error(
                        "store of a former incarnation not removed",
                        incarnation=incarnation,
                        error=str(error),
                    )
                else:
                    self.counts.formers_removed += 1
                    log.info("store of a former incarnation removed", incarnation=incarnation)

    async def drained(self, member: Member) -> bool:
        """Return whether no ledger's metadata names the member. Reads the metadata of all ledgers.
        Raises the errors of the metadata store."""
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            await self._metadata.sync(paths.LEDGERS)
        async for ledger in ledger_ids(self._metadata, paths.LEDGERS):
            await self._wait_turn()
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                stored = await self._metadata.get(paths.ledger(ledger))
            try:
                if stored is not None and _names(decode_ledger(stored.value), member):
                    return False
            except InvalidRecord as error:
                log.error(
                    "ledger metadata unreadable, it may name the member",
                    ledger=ledger,
                    error=str(error),
                )
                return False
        return True

    async def _reclaim_unreclaimed(self) -> None:
        """Until a round is completed, pass to the reclaimer the ledgers that an earlier process of
        the bookie deleted without reclaiming their space."""
        if self.counts.rounds == 0:
            async for page in self._tombstones():
                self._reclaimer.note_dead(at for at, stone in page if not stone.reclaimed)

    async def _note_reclaimed(self) -> None:
        """Mark the tombstones of ledgers whose space was reclaimed, so that the process does not
        compact the space again after its next start."""
        for number, ledger in enumerate(self._reclaimer.take_reclaimed(), 1):
            if number % MARKS_PER_STEP == 0:
                await asyncio.sleep(0)
            try:
                stone = self._storage.tombstone(ledger)
                if stone is None:
                    continue
                reclaimed = replace(decode_tombstone(stone), reclaimed=True)
            except (StorageFailed, FormatDamaged) as error:
                log.error("tombstone unreadable", ledger=ledger, error=str(error))
                continue
            self._commit.write([(tombstone_key(ledger), encode_tombstone(reclaimed))])

    async def _wait_turn(self) -> None:
        loop = asyncio.get_running_loop()
        delay_s = self._pace.delay_s(1, loop.time())
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    async def _read(self, read: Callable[[], T]) -> T:
        """Run `read` on the read thread. Raises CollectionAborted when the store cannot be read."""
        try:
            return await self._read_thread.do(read)
        except StorageFailed as error:
            raise CollectionAborted(str(error)) from error


def _names(metadata: LedgerMetadata, member: Member) -> bool:
    return any(member in segment.members for segment in metadata.segments)
