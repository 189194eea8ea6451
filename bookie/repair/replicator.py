"""Replicator: repairs ledgers with under-replication records. It holds the lock of a ledger during
its repair, and repairs several ledgers at once.

For each lost member of a sealed segment, placement chooses another bookie. The replicator copies
the entries of the seat to this bookie, durably. After that, the replicator names the new bookie in
the metadata (`replace_member`, if the lost member still has the seat). The replicator's reads do
not fence the ledger, so its writer continues. The lost member may be alive, or another replicator
may repair the same ledger. In both cases the worst result is an extra copy, which its bookie
deletes later.

The last segment of an open ledger belongs to the ledger's writer. A running writer replaces a lost
bookie itself. If the lost bookie is still a member after `open_grace_s`, the replicator recovers
the ledger: it fences and closes the ledger. The replicator does this only for a member that is
recorded as lost and has not been listed during the grace, and only if there is a spare bookie or a
recovery has begun already. Failed repairs of sealed segments do not delay the recovery.

The replicator widens a ledger that was created with too few bookies, after the ledger is closed: it
adds a bookie with all entries. The other bookies hold all entries, too, so readers with old
metadata can still read the ledger. The replicator does not copy the entries into a new ledger,
because this would change the positions of the messages.

The replicator retries a failed repair with growing pauses. The under-replication record holds the
reason. The replicator stores each finished step at once, so that no retry repeats it. After copying
entries to a new member, it names the member in the metadata. After replacing bad copies, it removes
them from the record. If another process has changed the record meanwhile, the replaced copies may
be bad again. Then the record stays as it is, and the next repair replaces these copies again.

A retry also continues a step that failed. The replicator removes from the record those bad copies
that it had replaced before the failure. It remembers in memory which entries it has copied to a new
member (`unfinished_copies.py`). The new member may have deleted these entries between the attempts,
so the retry first asks the bookie for them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Final, TypeGuard

from magnetar.bookie.ledger.errors import EntryUnreadable, LedgerError
from magnetar.bookie.ledger.health import Grade
from magnetar.bookie.ledger.quorum import Quorum
from magnetar.bookie.repair.copying import CopyProgress, copy_entries, first_missing
from magnetar.bookie.repair.errors import CopyFailed, NoTarget, Overtaken, RepairError, StillWritten
from magnetar.bookie.repair.pace import Pace
from magnetar.bookie.repair.pause import PauseWatch
from magnetar.bookie.repair.plan import Move, Rewrite, plan_repair
from magnetar.bookie.repair.unfinished_copies import UnfinishedCopies, UnfinishedCopy
from magnetar.metadata import paths
from magnetar.metadata.codec import decode_bookie_registration
from magnetar.metadata.errors import InvalidRecord, MetadataError
from magnetar.metadata.model import BookieId, LedgerId, LedgerState, Member
from magnetar.protos.envelope import BookieCode
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from random import Random

    from magnetar.bookie.ledger.services import Services
    from magnetar.bookie.repair.config import RepairConfig
    from magnetar.bookie.repair.plan import RepairPlan, Step
    from magnetar.bookie.repair.under_replication_records import (
        UnderReplicationRecord,
        UnderReplicationRecords,
    )
    from magnetar.metadata.model import LedgerMetadata, Segment
    from magnetar.metadata.store import MetadataStore
    from magnetar.metadata.under_replication import UnderReplication
    from magnetar.runtime.clock import Clock

log = get_logger(__name__)

# The replicator reads the records when the folder of the records changes, when bookies join or
# leave, and at this interval. It polls because the store reports changes in a folder, but not in
# the folders below. A read that finds no record costs one request.
POLL_S: Final = 5.0
PASS_S: Final = 60.0
"""After this time the replicator reads the records again, although it has not begun all repairs of
the last read. The repair of 10,000 ledgers can take hours. Meanwhile, the number of records falls
and postponed ledgers become due."""

SAMPLE_MAX: Final = 10_000
"""One read of the records selects at most this many ledgers. The selection is random, so that
replicators seldom choose the same ledger."""

TROUBLES_MAX: Final = 100_000
"""The limit of ledgers whose retry time the replicator remembers: 20 MB. At the limit, it forgets
the oldest ledger, and tries this ledger again at once."""

UNREADABLE_MAX: Final = 16
"""The limit of unreadable entries that an attempt skips while it rewrites a range of bad copies.
Each costs a request to every replica. At the next one the attempt stops; a later attempt tries the
rest of the range."""

ENTRY_REFUSED: Final = frozenset(
    {BookieCode.NO_SUCH_LEDGER, BookieCode.NO_SUCH_ENTRY, BookieCode.IO_ERROR, BookieCode.CORRUPT}
)
"""The answers of a serving bookie that cannot return an entry."""

TAILS_MAX: Final = 100_000
"""The limit of open ledgers whose grace the replicator measures: 90 MB. At the limit, the grace of
a further ledger begins when the replicator no longer measures the grace of another ledger."""

RETRY_S_FIRST: Final = 5.0
RETRY_S_MAX: Final = 300.0
WRITTEN_RECHECK_S: Final = 10.0
"""The pause between two looks at a ledger that waits for its writer. With a shorter `open_grace_s`
it is shorter, too: otherwise the recovery would begin long after the grace."""

_PLACEHOLDER: Final = Member(BookieId("?"), "0" * 32)
"""Holds the new seat of a widened segment until a bookie is chosen for it."""


@dataclass(slots=True)
class ReplicatorCounts:
    """Counts since the start of the process."""

    ledgers_repaired: int = 0  # records removed
    repairs_failed: int = 0
    copied_bytes: int = 0
    members_replaced: int = 0
    ledgers_recovered: int = 0  # taken over from their writers


@dataclass(slots=True)
class _Trouble:
    """A ledger that could not be repaired."""

    retry_at: float
    pause_s: float


@dataclass(frozen=True, slots=True)
class _Tail:
    """The last segment of an open ledger, with a lost member. `since`: the time when this
    replicator first saw the segment in this state."""

    segment: Segment
    state: LedgerState
    since: float


class Replicator:
    """Repairs ledgers while `run` is running. `services` and `recover` belong to a `Ledgers`, which
    must be running, too."""

    def __init__(
        self,
        store: MetadataStore,
        under_replication: UnderReplicationRecords,
        services: Services,
        config: RepairConfig,
        clock: Clock,
        random: Random,
        *,
        name: str,
        recover: Callable[[LedgerId], Awaitable[LedgerMetadata]],
        sample_max: int = SAMPLE_MAX,
    ) -> None:
        """`name` identifies this process in its locks."""
        self.counts = ReplicatorCounts()
        self.under_replicated = 0  # ledgers with a record, at the last read
        self._store = store
        self._under_replication = under_replication
        self._services = services
        self._config = config
        self._clock = clock
        self._random = random
        self._name = name
        self._recover = recover
        self._sample_max = sample_max
        self._pace = Pace(config.copy_bytes_per_s)
        self._unfinished = UnfinishedCopies()
        self._wake = asyncio.Event()
        self._pause = PauseWatch(store, on_change=self._wake.set)
        self._working: set[LedgerId] = set()
        self._troubles: dict[LedgerId, _Trouble] = {}  # the troubles of ledgers with a record
        self._tails: dict[LedgerId, _Tail] = {}  # the tails of ledgers with a record
        # When this replicator first saw that a member of a tail was lost. A member that is listed
        # again is removed. So the size is limited by the number of bookies and their incarnations.
        self._lost_since: dict[Member, float] = {}

    async def run(self) -> None:
        """Repair ledgers with records, until cancelled."""
        unwatch = [
            self._store.watch(paths.UNDER_REPLICATED, self._wake.set),
            self._services.directory.watch(self._on_bookies_changed),
        ]
        slots = asyncio.Semaphore(self._config.ledgers_at_once)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pause.run())
                while True:
                    self._wake.clear()
                    due = await self._due()
                    ends_at = self._now() + PASS_S
                    for ledger in due:
                        try:
                            async with asyncio.timeout_at(ends_at):
                                await slots.acquire()
                        except TimeoutError:
                            self._wake.set()
                            break
                        self._working.add(ledger)
                        group.create_task(self._work(ledger, slots))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(POLL_S):
                            await self._wake.wait()
        finally:
            for end in unwatch:
                end()

    async def _due(self) -> Sequence[LedgerId]:
        """Return ledgers with a record, in random order. Ledgers that must wait, or whose repair is
        running, are left out. The result is empty while repair is paused."""
        sample: list[LedgerId] = []
        count = 0
        gone = {*self._troubles, *self._tails}  # minus the ledgers whose records are found below
        try:
            async for ledger in self._under_replication.list():
                count += 1
                gone.discard(ledger)
                if len(sample) < self._sample_max:
                    sample.append(ledger)
                elif (place := self._random.randrange(count)) < self._sample_max:
                    sample[place] = ledger
        except MetadataError as error:
            log.warning("under-replication records not read", error=str(error))
            return ()
        self.under_replicated = count
        for ledger in gone:
            self._forget(ledger)
        now = self._now()
        due = [each for each in sample if each not in self._working and self._may_try(each, now)]
        self._random.shuffle(due)
        return () if self._pause.paused else due

    async def _work(self, ledger: LedgerId, slots: asyncio.Semaphore) -> None:
        try:
            async with self._under_replication.holding(ledger, self._name) as locked:
                if locked is not None:
                    await self._repair(ledger, locked)
        except MetadataError as error:
            log.warning("repair postponed", ledger=ledger, error=str(error))
            self._put_off(ledger)
        finally:
            self._working.discard(ledger)
            slots.release()

    # -- one ledger ------------------------------------------------------------------------------

    async def _repair(self, ledger: LedgerId, locked: Callable[[], bool]) -> None:
        """Do all possible steps for the ledger. Raises the errors of the metadata store.

        After the loss of the lock, the replicator names no further member in the metadata. The
        copied entries may be gone: the metadata does not name the target yet, so the collector of
        the target may take the lock and delete them.

        After the loss of the lock, the replicator does not change the record either. Another
        replicator may have deleted the record, and a later record begins with the same version.
        """
        record = await self._under_replication.get(ledger)
        if record is None:
            return
        # Rewrites that this call has tried. The plan shows them again if the record did not change.
        done: set[Rewrite] = set()
        failed: dict[Step, RepairError | LedgerError] = {}
        while True:
            if self._pause.paused:
                return  # the record stays
            metadata = await self._services.records.get(ledger)
            if metadata is None:
                break  # the ledger was deleted
            plan = self._plan(metadata, record.faults)
            step = next((s for s in plan.steps if s not in done and s not in failed), None)
            if step is None:
                break
            if isinstance(step, Rewrite):
                done.add(step)
                written, left = await self._rewrite(step, metadata)
                failed |= left  # they wait for a retry
                faults = record.faults
                for part in written:
                    faults = faults.rewritten(step.member, part.start, part.stop - 1)
                if locked():
                    record = await self._under_replication.replace(record, faults) or record
                continue
            try:
                if isinstance(step, Move):
                    await self._move(step, metadata, locked)
                else:
                    await self._widen(metadata, locked)
            except (RepairError, LedgerError) as error:
                failed[step] = error
        reason: RepairError | LedgerError | None = next(iter(failed.values()), None)
        recover_at = inf
        if metadata is not None and plan.unwritable:
            recover_at = self._recover_at(metadata, plan, record.faults)
            if recover_at <= self._now():
                await self._find_returned(plan.unwritable)
                recover_at = self._recover_at(metadata, plan, record.faults)
            if recover_at <= self._now():
                refusal = await self._recover_tail(metadata, grace_ended_at=recover_at)
                if refusal is None:
                    self._wake.set()  # the ledger is closed now; the next pass does the rest
                    return
                reason, recover_at = refusal, inf
            elif reason is None:
                await self._note(record, _still_written(ledger, plan), locked)
                grace_s = max(self._config.open_grace_s, RETRY_S_FIRST)
                self._put_off(ledger, min(grace_s, WRITTEN_RECHECK_S))
                return
        if reason is not None:
            await self._note(record, reason, locked)
            self.counts.repairs_failed += 1
            self._put_off(ledger, at_latest=recover_at)
        elif locked() and await self._under_replication.clear(record):
            log.info("ledger repaired", ledger=ledger, deleted=metadata is None)
            self.counts.ledgers_repaired += 1
            self._forget(ledger)

    def _plan(self, metadata: LedgerMetadata, faults: UnderReplication) -> RepairPlan:
        """Plan the repair. A member that is recorded as lost but is listed again keeps its seat,
        unless its bookie is decommissioned."""
        directory = self._services.directory
        leaving = directory.decommissioned
        gone = frozenset(
            member
            for member in faults.lost
            if member not in directory.listed or member.bookie in leaving
        )
        return plan_repair(metadata, faults, gone, copies_wanted=self._services.config.write_quorum)

    async def _rewrite(
        self, step: Rewrite, metadata: LedgerMetadata
    ) -> tuple[list[range], dict[Step, RepairError | LedgerError]]:
        """Write the entries to their member again, except entries that no replica can return.
        Returns the written entries, and the remaining steps, each with the first error of this
        call. Raises the errors of the metadata store."""
        written: list[range] = []
        left: list[range] = []
        failure: RepairError | LedgerError | None = None
        at, skipped = step.first, 0
        while at <= step.last:
            progress, following = CopyProgress(at), step.last + 1
            try:
                await self._copy(metadata, step.seat, step.last, step.member, progress)
            except (RepairError, LedgerError) as error:
                failure = failure or error
                if _concerns_one_entry(error, step.member.bookie) and skipped < UNREADABLE_MAX:
                    following = error.entry + 1
                    skipped += 1
                joins = left and left[-1].stop == progress.following
                begin = left.pop().start if joins else progress.following
                left.append(range(begin, following))
            if progress.following > at:
                written.append(range(at, progress.following))
                log.info(
                    "entries written again",
                    ledger=metadata.ledger,
                    first=at,
                    last=progress.following - 1,
                    bookie=step.member.bookie,
                )
            at = following
        if failure is None:
            return written, {}
        return written, {
            replace(step, first=part.start, last=part.stop - 1): failure for part in left
        }

    async def _move(self, move: Move, metadata: LedgerMetadata, locked: Callable[[], bool]) -> None:
        """Copy the entries of a lost member's seat to another bookie, and give this bookie the
        seat. Raises NoTarget, CopyFailed, EntryUnreadable, Overtaken, or the errors of the metadata
        store."""
        quorum = Quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
        segment = next(part for part in metadata.segments if part.first_entry == move.first)
        target, copied = await self._fill(
            metadata, quorum, segment, move.seat, move.last, stripes_of=move.seat
        )
        stored = await self._services.records.replace_member(
            metadata.ledger, move.first, move.lost, target, wanted=locked
        )
        if stored is None:
            raise Overtaken(metadata.ledger)
        self._unfinished.drop(metadata.ledger, move.first, move.seat)
        self.counts.members_replaced += 1
        log.info(
            "member replaced",
            ledger=metadata.ledger,
            first=move.first,
            last=move.last,
            lost=move.lost.bookie,
            by=target.bookie,
            bytes=copied,
        )

    async def _widen(self, metadata: LedgerMetadata, locked: Callable[[], bool]) -> None:
        """Add a bookie with all entries to each segment. Raises the errors of `_move`."""
        copies = metadata.write_quorum + 1
        quorum = Quorum(copies, copies, metadata.ack_quorum)
        added = []
        assert metadata.last_entry is not None
        ends = [part.first_entry - 1 for part in metadata.segments[1:]] + [metadata.last_entry]
        for segment, last in zip(metadata.segments, ends, strict=True):
            # Each bookie holds all entries, so the stripes of any seat are right.
            target, _ = await self._fill(metadata, quorum, segment, copies - 1, last, stripes_of=0)
            added.append(target)
        stored = await self._services.records.widen(
            metadata, added, write_quorum=self._services.config.write_quorum, wanted=locked
        )
        if stored is None:
            raise Overtaken(metadata.ledger)
        for segment in metadata.segments:
            self._unfinished.drop(metadata.ledger, segment.first_entry, copies - 1)
        log.info("ledger widened", ledger=metadata.ledger, copies=copies)

    async def _fill(
        self,
        metadata: LedgerMetadata,
        quorum: Quorum,
        segment: Segment,
        seat: int,
        last: int,
        *,
        stripes_of: int,
    ) -> tuple[Member, int]:
        """Copy the entries of the segment that are striped to the seat `stripes_of` to a bookie
        that may take `seat`. Continues an earlier copy for this seat. Returns the bookie and the
        bytes copied now. Raises NoTarget, CopyFailed, EntryUnreadable."""
        ledger, first = metadata.ledger, int(segment.first_entry)
        before = self._unfinished.find(ledger, first, seat)
        target = await self._target(ledger, quorum, segment, seat, before)
        reached = there = first
        if before is not None and before.target == target:
            reached = before.following
            there = await first_missing(
                metadata, stripes_of, first, reached - 1, target, self._services
            )
        # The target lists the entries before `there`. It may have got some of them from another
        # replicator, and not have them on disk yet. So this copy sends at least one entry before
        # `there` again: the target acknowledges it when all earlier entries are on disk.
        progress = CopyProgress(max(first, there - metadata.ensemble_size))
        target_fails = False
        try:
            await self._copy(metadata, stripes_of, last, target, progress)
        except CopyFailed:
            target_fails = progress.following <= reached
            raise
        finally:
            following = max(there, progress.following)
            if following > first:
                copy = UnfinishedCopy(segment, target, following, target_fails)
                self._unfinished.keep(ledger, first, seat, copy)
            elif target_fails and before is not None and before.target == target:
                # An unreachable target may still have the entries.
                copy = replace(before, target_fails=True)
                self._unfinished.keep(ledger, first, seat, copy)
        return target, progress.copied_bytes

    async def _target(
        self,
        ledger: LedgerId,
        quorum: Quorum,
        segment: Segment,
        seat: int,
        before: UnfinishedCopy | None,
    ) -> Member:
        """Choose the bookie that takes the seat: if possible, the target of the copy that failed
        before. Raises NoTarget."""
        if before is not None and before.fits(segment) and self._is_reliable(before.target):
            return before.target
        seated = list(segment.members)
        seated += [_PLACEHOLDER] * (quorum.ensemble_size - len(seated))
        spares = await self._services.ensembles.spares(quorum, seated, [seat])
        if seat not in spares:
            raise NoTarget(ledger, segment.first_entry)
        return spares[seat]

    def _is_reliable(self, member: Member) -> bool:
        grade = self._services.health.grade(member, self._now())
        return self._services.directory.is_writable(member) and grade < Grade.FAILING

    async def _copy(
        self,
        metadata: LedgerMetadata,
        seat: int,
        last: int,
        target: Member,
        progress: CopyProgress,
    ) -> None:
        try:
            await copy_entries(metadata, seat, last, target, self._services, self._pace, progress)
        finally:
            self.counts.copied_bytes += progress.copied_bytes

    # -- ledgers being written -------------------------------------------------------------------

    def _recover_at(
        self, metadata: LedgerMetadata, plan: RepairPlan, faults: UnderReplication
    ) -> float:
        """Return the time at which the writer's grace ends and the replicator recovers the ledger.
        Infinite: a recovery is not allowed or would not help.

        The grace begins when this replicator first sees the tail with a lost member. If the member
        is listed again, the grace begins anew with the next loss."""
        ledger, tail, now = metadata.ledger, metadata.last_segment, self._now()
        listed = self._services.directory.listed
        lost = [each for each in plan.unwritable if each in faults.lost and each not in listed]
        if not lost:
            self._tails.pop(ledger, None)
            return inf
        seen = self._tails.get(ledger)
        if seen is None and len(self._tails) >= TAILS_MAX:
            return inf
        if seen is None or (seen.segment, seen.state) != (tail, metadata.state):
            seen = self._tails[ledger] = _Tail(tail, metadata.state, now)
        for each in lost:
            self._lost_since.setdefault(each, now)
        since = max(seen.since, min(self._lost_since[each] for each in lost))
        hopeful = metadata.state is LedgerState.IN_RECOVERY or self._services.ensembles.has_spare(
            tail.members
        )
        return since + self._config.open_grace_s if hopeful else inf

    async def _find_returned(self, members: Sequence[Member]) -> None:
        """Begin the grace anew for the members that are registered. The list of bookies may be old:
        after a time without the metadata store, the replicator may come here before the list is
        read again. Raises the errors of the metadata store."""
        await self._store.sync(paths.BOOKIES_AVAILABLE)
        for member in members:
            stored = await self._store.get(paths.bookie_available(member.bookie))
            with suppress(InvalidRecord):  # such a registration lists no bookie
                if stored is not None and decode_bookie_registration(stored.value).member == member:
                    self._lost_since.pop(member, None)

    async def _recover_tail(
        self, metadata: LedgerMetadata, *, grace_ended_at: float
    ) -> LedgerError | None:
        """Recover the ledger. Returns None if the ledger is closed, otherwise the error of the
        recovery."""
        log.warning(
            "recovering ledger whose writer kept a lost bookie",
            ledger=metadata.ledger,
            state=metadata.state.name,
            seconds=self._now() - grace_ended_at + self._config.open_grace_s,
        )
        try:
            await self._recover(metadata.ledger)
        except LedgerError as error:
            return error
        self.counts.ledgers_recovered += 1
        return None

    # -- postponed repairs -----------------------------------------------------------------------

    async def _note(
        self,
        record: UnderReplicationRecord,
        error: RepairError | LedgerError,
        locked: Callable[[], bool],
    ) -> None:
        """Store the reason in the record, unless the record has the same reason already."""
        log.warning("ledger not repaired", ledger=record.ledger, error=str(error))
        faults = record.faults.failed(str(error), self._clock.now_ms())
        if faults.failure != record.faults.failure and locked():
            await self._under_replication.replace(record, faults)

    def _put_off(
        self, ledger: LedgerId, pause_s: float | None = None, *, at_latest: float = inf
    ) -> None:
        """Repair the ledger again after a random time from half the pause to the whole pause, but
        not later than `at_latest`. `pause_s` None: twice the previous pause, at least RETRY_S_FIRST
        and at most RETRY_S_MAX."""
        trouble = self._troubles.get(ledger)
        if pause_s is None:
            before = RETRY_S_FIRST / 2 if trouble is None else trouble.pause_s
            pause_s = min(2 * before, RETRY_S_MAX)
        if trouble is None and len(self._troubles) >= TROUBLES_MAX:
            # The forgotten ledger keeps its tail, so its grace continues.
            del self._troubles[next(iter(self._troubles))]
        retry_at = self._now() + pause_s * self._random.uniform(0.5, 1.0)
        self._troubles[ledger] = _Trouble(min(retry_at, at_latest), pause_s)

    def _may_try(self, ledger: LedgerId, now: float) -> bool:
        trouble = self._troubles.get(ledger)
        return trouble is None or trouble.retry_at <= now

    def _on_bookies_changed(self) -> None:
        """A failed repair may succeed now. If it fails again, its pauses begin with RETRY_S_FIRST
        again. Otherwise a repair that failed repeatedly while bookies joined and left would wait
        for minutes. A member that is listed again is no longer lost."""
        for member in self._services.directory.listed:
            self._lost_since.pop(member, None)
        for trouble in self._troubles.values():
            trouble.retry_at, trouble.pause_s = 0.0, RETRY_S_FIRST / 2
        self._wake.set()

    def _forget(self, ledger: LedgerId) -> None:
        self._troubles.pop(ledger, None)
        self._tails.pop(ledger, None)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _concerns_one_entry(
    error: RepairError | LedgerError, target: str
) -> TypeGuard[EntryUnreadable]:
    """Return whether other entries may be readable: no bookie was too slow, and a bookie other than
    the target refused this entry. Bookies that do not serve refuse each entry, and do not count."""
    return (
        isinstance(error, EntryUnreadable)
        and not error.deleted
        and BookieCode.TIMEOUT not in error.answers.values()
        and any(
            bookie != target and code in ENTRY_REFUSED for bookie, code in error.answers.items()
        )
    )


def _still_written(ledger: LedgerId, plan: RepairPlan) -> StillWritten:
    return StillWritten(ledger, ", ".join(member.bookie for member in plan.unwritable))
