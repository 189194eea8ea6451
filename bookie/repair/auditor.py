"""Auditor: finds ledgers that need repair, and writes under-replication records for them.

The autorecovery processes elect one auditor. During a change of leader, two auditors may run at
once. They then only write the same records twice.

The auditor has two duties. An *audit* reads the metadata of every ledger once per period, and when
one of the facts in `_subject` changes: for example, when a bookie is declared lost. The audit finds
the ledgers with a member that is lost or unknown (`lost_bookies.py`) or decommissioned. It also
finds the narrow ledgers (made with fewer copies than wanted, see plan.py) for which another bookie
is available.

A *comparison* goes through all ledgers in rotation, over a longer period. It asks each listed
member of each sealed segment for its stored entries, and records the entries that are missing from
the member's stripes. This includes entries in the middle of a segment, where a confirmed entry may
have only an ack quorum of copies. An entry counts as missing only if the bookie answers that it
does not have the entry; a busy or absent bookie causes no record. If the ranges of missing entries
are many, the closest are joined, and then also contain entries that the bookie has. The auditor
stores its position in the rotation in the metadata store, so that a new auditor continues there.

Both duties stop while an operator has paused repair (pause.py). The auditor keeps nothing in memory
per ledger.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from magnetar.bookie.ledger.errors import BookieUnavailable
from magnetar.bookie.ledger.quorum import quorum_of
from magnetar.bookie.repair.census import all_ledgers, read_ledgers
from magnetar.bookie.repair.lost_bookies import LostBookies, Presence
from magnetar.bookie.repair.pace import Pace
from magnetar.bookie.repair.pause import PauseWatch
from magnetar.bookie.repair.plan import COMPARED_AT_ONCE, is_narrow, missing, sealed, striped
from magnetar.metadata import paths
from magnetar.metadata.codec import (
    decode_bookie_cookie,
    decode_check_progress,
    encode_check_progress,
)
from magnetar.metadata.election import Election
from magnetar.metadata.errors import CorruptRecord, InvalidRecord, MetadataError
from magnetar.metadata.ledger_tree import ledger_ids
from magnetar.metadata.model import BookieId, EntryId, LedgerId
from magnetar.metadata.store import ABSENT
from magnetar.metadata.under_replication import BadCopy, CheckProgress, joined
from magnetar.protos.envelope import BookieCode
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from magnetar.bookie.ledger.services import Services
    from magnetar.bookie.repair.config import RepairConfig
    from magnetar.bookie.repair.under_replication_records import UnderReplicationRecords
    from magnetar.metadata.model import LedgerMetadata, Member
    from magnetar.metadata.store import MetadataStore
    from magnetar.runtime.clock import Clock

log = get_logger(__name__)

RETRY_S: Final = 2.0
"""The pause after an error of the metadata store."""

PROGRESS_S: Final = 60.0
"""The interval in seconds at which the auditor stores its position in the rotation. A new auditor
repeats the work since the last stored position."""


RANGES_MAX: Final = 10_000
"""Above this number of ranges of missing entries, the auditor joins the closest ranges: those of
one member after each step of its comparison, and those of the ledger after each member."""


@dataclass(slots=True)
class Findings:
    """The auditor's counts since the start of the process. Times are in milliseconds since 1970; 0
    means unknown in this process."""

    audits: int = 0
    audited_ms: int = 0  # end of the last complete audit
    ledgers: int = 0  # the number of ledgers in that audit
    # ledgers in that audit whose metadata or under-replication record is unreadable
    unreadable: int = 0
    recorded: int = 0  # under-replication records created or extended
    compared: int = 0  # comparisons of a ledger
    compared_ms: int = 0  # end of the last complete round, perhaps of an earlier auditor
    missing_entries: int = 0  # missing copies found


class Auditor:
    """Finds ledgers that need repair, while `run` is running. The `Ledgers` object whose services
    the auditor uses must be running, too."""

    def __init__(
        self,
        store: MetadataStore,
        under_replication: UnderReplicationRecords,
        services: Services,
        config: RepairConfig,
        clock: Clock,
        *,
        name: str,
    ) -> None:
        """`name` must be unique among all processes, and must change at each start."""
        self.findings = Findings()
        self._store = store
        self._under_replication = under_replication
        self._services = services
        self._config = config
        self._clock = clock
        self._lost_bookies = self._new_lost_bookies()
        self._known: dict[BookieId, str] = {}  # bookie -> incarnation, from the cookies
        # the unknown members for which this audit has already read the cookies again
        self._unknown_members: set[Member] = set()
        self._scan_pace = Pace(config.scan_ledgers_per_s)
        self._on_duty = asyncio.Event()  # elected, and repair is not paused
        self._off_duty = asyncio.Event()
        self._changed = asyncio.Event()  # the bookies or their states have changed
        self._audited = asyncio.Event()  # set after the first complete audit
        self._election = Election(
            store, paths.AUDITOR, name.encode(), on_change=self._on_leadership
        )
        self._pause = PauseWatch(store, on_change=self._judge)

    @property
    def is_leader(self) -> bool:
        return self._election.is_leader

    @property
    def paused(self) -> bool:
        """True when an operator has paused repair, or the pause record is unread or unreadable."""
        return self._pause.paused

    @property
    def held(self) -> bool:
        """True on the leader when too many bookies are missing at once, so that no further one is
        declared lost."""
        return self.is_leader and self._lost_bookies.held

    async def run(self) -> None:
        """Take part in the election, and do both duties while elected. Runs until it is
        cancelled."""
        await self._services.directory.wait_ready()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._election.run())
            group.create_task(self._pause.run())
            while True:
                await self._on_duty.wait()
                async with asyncio.TaskGroup() as term:
                    duties = [term.create_task(self._audits()), term.create_task(self._rounds())]
                    await self._off_duty.wait()
                    for duty in duties:
                        duty.cancel()

    def _on_leadership(self, leads: bool) -> None:
        log.info("auditor elected" if leads else "auditor no longer elected")
        self._judge()

    def _judge(self) -> None:
        works = self.is_leader and not self.paused
        for event, on in ((self._on_duty, works), (self._off_duty, not works)):
            event.set() if on else event.clear()

    # -- audits ----------------------------------------------------------------------------------

    def _new_lost_bookies(self) -> LostBookies:
        config = self._config
        return LostBookies(delay_s=config.lost_bookie_delay_s, at_once_max=config.lost_at_once_max)

    async def _audits(self) -> None:
        loop = asyncio.get_running_loop()
        # A bookie that was missing in an earlier term, or before a pause, may have returned since.
        self._lost_bookies = self._new_lost_bookies()
        unwatch = [
            self._services.directory.watch(self._changed.set),
            self._store.watch(paths.BOOKIE_COOKIES, self._changed.set),
        ]
        seen: object = None  # `_subject()` of the last audit; None: no audit yet, or it failed
        due_at = loop.time()
        try:
            while True:
                self._changed.clear()
                try:
                    await self._look()
                    if seen != self._subject() or loop.time() >= due_at:
                        seen = self._subject()
                        due_at = loop.time() + self._config.audit_period_s
                        await self._audit()
                        continue
                except MetadataError as error:
                    log.warning("audit failed", error=str(error))
                    seen = None
                    await asyncio.sleep(RETRY_S)
                    continue
                timer_at = self._lost_bookies.timer_at()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(min(due_at, timer_at or due_at)):
                        await self._changed.wait()
        finally:
            for end in unwatch:
                end()

    def _subject(self) -> object:
        """Return the facts, besides the ledgers, on which an audit's findings depend."""
        directory = self._services.directory
        writable = frozenset(each.member for each in directory.writable)
        # Among few bookies, it matters which of them can take another copy of a narrow ledger.
        takers = writable if len(writable) < self._services.config.write_quorum else None
        any_listed = len(directory.listed) > 0
        return (
            dict(self._known),
            self._lost_bookies.given_up,
            directory.decommissioned,
            takers,
            any_listed,
        )

    async def _look(self) -> None:
        """Read which bookies the cluster has and which of them are registered, and decide which
        bookies are lost."""
        await self._store.sync(paths.BOOKIE_COOKIES)
        known: dict[BookieId, str] = {}
        for name in await self._store.children(paths.BOOKIE_COOKIES):
            stored = await self._store.get(f"{paths.BOOKIE_COOKIES}/{name}")
            if stored is not None:
                cookie = decode_bookie_cookie(stored.value)
                known[cookie.bookie] = cookie.incarnation
        directory = self._services.directory
        before, held = self._lost_bookies.given_up, self._lost_bookies.held
        self._known = known
        now = asyncio.get_running_loop().time()
        self._lost_bookies.on_bookies(known, directory.listed, directory.decommissioned, now)
        self._lost_bookies.check()
        for member in self._lost_bookies.given_up - before:
            log.warning(
                "bookie declared lost", bookie=member.bookie, incarnation=member.incarnation
            )
        if self._lost_bookies.held and not held:
            missing_now = sorted(member.bookie for member in self._lost_bookies.awaited)
            log.error("too many bookies missing at once, none declared lost", missing=missing_now)

    async def _audit(self) -> None:
        """Read every ledger once, and record the ledgers that need repair. Raises MetadataError;
        the audit is then incomplete."""
        if not self._services.directory.listed:
            return  # no bookie to copy from or to; probably no disk was lost
        findings, ledgers, unreadable = self.findings, 0, 0
        self._unknown_members.clear()
        async for batch in all_ledgers(self._store, self._scan_pace):
            if self._changed.is_set():
                self._changed.clear()
                await self._look()  # if `_subject` changes, `_audits` audits all ledgers again
            for ledger, metadata in batch:
                ledgers += 1
                if metadata is None:
                    unreadable += 1
                    continue
                try:
                    await self._record(ledger, metadata)
                except InvalidRecord as error:
                    log.error("ledger cannot be audited", ledger=ledger, error=str(error))
                    unreadable += 1
        findings.ledgers, findings.unreadable = ledgers, unreadable
        findings.audits += 1
        findings.audited_ms = self._clock.now_ms()
        self._audited.set()
        log.info(
            "ledgers audited", ledgers=ledgers, unreadable=unreadable, recorded=findings.recorded
        )

    async def _record(self, ledger: LedgerId, metadata: LedgerMetadata) -> None:
        members = {member for segment in metadata.segments for member in segment.members}
        unknown = {
            each for each in members if self._lost_bookies.presence(each) is Presence.UNKNOWN
        }
        if unknown - self._unknown_members:
            await self._look()  # the members may belong to new bookies
            self._unknown_members |= unknown
        leaving = self._services.directory.decommissioned
        lost = {
            member
            for member in members
            if self._lost_bookies.presence(member) in (Presence.LOST, Presence.UNKNOWN)
            or member.bookie in leaving
        }
        if lost and await self._under_replication.add_lost(ledger, lost):
            self.findings.recorded += 1
        if is_narrow(metadata, self._services.config.write_quorum):
            writable = {each.member for each in self._services.directory.writable}
            possible = all(writable.difference(part.members) for part in metadata.segments)
            if possible and await self._under_replication.add_narrow(ledger):
                self.findings.recorded += 1

    # -- comparisons -----------------------------------------------------------------------------

    async def _rounds(self) -> None:
        await self._audited.wait()  # `_end_turn` needs the number of ledgers
        while True:
            try:
                await self._round()
            except MetadataError as error:
                log.warning("comparison interrupted", error=str(error))
                await asyncio.sleep(RETRY_S)

    async def _round(self) -> None:
        """Compare the copies of all ledgers after the stored position. Raises MetadataError."""
        loop = asyncio.get_running_loop()
        stored = await self._store.get(paths.CHECKED)
        if stored is None:
            progress, version = CheckProgress(self._clock.now_ms()), ABSENT
        else:
            progress, version = self._progress(stored.value), stored.version
        self.findings.compared_ms = progress.finished_ms
        turn_at = saved_at = loop.time()
        first = True
        async for ledger in ledger_ids(self._store, paths.LEDGERS, after=progress.after):
            if not first:
                await self._end_turn(turn_at)
            first, turn_at = False, loop.time()
            for _, metadata in await read_ledgers(self._store, [ledger]):
                if metadata is None:
                    continue
                try:
                    await self._compare(metadata)
                except InvalidRecord as error:
                    log.error("ledger cannot be compared", ledger=ledger, error=str(error))
            progress = replace(progress, after=ledger)
            if loop.time() - saved_at >= PROGRESS_S:
                version = await self._save(progress, version)
                saved_at = loop.time()
        now_ms = self._clock.now_ms()
        done = replace(progress, began_ms=now_ms, after=-1, finished_ms=now_ms)
        await self._save(done, version)
        self.findings.compared_ms = now_ms
        log.info("comparison of all ledgers complete", compared=self.findings.compared)
        # Wait for the end of the last ledger's turn. If there is no ledger, this wait prevents
        # rounds without a pause.
        await self._end_turn(turn_at)

    async def _end_turn(self, began_at: float) -> None:
        """Wait until a ledger's turn is over. The length of a turn is `check_period_s` divided by
        the number of ledgers in the last audit. The number at the start of the round would not do:
        in a round that began with one ledger, each later ledger would take a whole period."""
        loop = asyncio.get_running_loop()
        while True:
            ends_at = began_at + self._config.check_period_s / max(1, self.findings.ledgers)
            left_s = ends_at - loop.time()
            if left_s <= 0:
                return
            await asyncio.sleep(min(left_s, self._config.audit_period_s))

    def _progress(self, value: bytes) -> CheckProgress:
        try:
            return decode_check_progress(value)
        except CorruptRecord as error:
            log.error("comparison position unreadable, starting again", error=str(error))
            return CheckProgress(self._clock.now_ms())

    async def _save(self, progress: CheckProgress, version: int) -> int:
        """Store the position in the rotation. Returns the new version. Raises BadVersion when
        another auditor has stored its position; that position stays."""
        value = encode_check_progress(progress)
        return await self._store.put(paths.CHECKED, value, expected=version)

    async def _compare(self, metadata: LedgerMetadata) -> None:
        """Record the entries that members of sealed segments lack."""
        listed = self._services.directory.listed
        bad: list[BadCopy] = []
        for first, last, segment in sealed(metadata):
            for seat, member in enumerate(segment.members):
                if first <= last and member in listed:
                    bad += await self._lacking(metadata, seat, member, first, last)
                if len(bad) > RANGES_MAX:
                    bad = list(joined(bad))
        self.findings.compared += 1
        if bad:
            log.warning("copies missing", ledger=metadata.ledger, ranges=len(bad))
            if await self._under_replication.add_bad_copies(metadata.ledger, bad):
                self.findings.recorded += 1

    async def _lacking(
        self, metadata: LedgerMetadata, seat: int, member: Member, first: int, last: int
    ) -> list[BadCopy]:
        """Return ranges of the entries that `member` should store at this seat and does not store.
        An entry counts only if the bookie has answered that it lacks the entry. A range may also
        contain entries of other seats between two missing runs and, after `joined`, entries that
        the bookie has."""
        bad: list[BadCopy] = []
        quorum = quorum_of(metadata)
        at = first
        while at <= last:
            try:
                async with asyncio.timeout(self._services.config.read_timeout_s):
                    page = await self._services.pool.peer(member).list_entries(metadata.ledger, at)
            except (BookieUnavailable, StreamClosed, TimeoutError):
                break
            if page.code is BookieCode.NO_SUCH_LEDGER:
                held, end = [], last
            elif page.code is BookieCode.OK:
                held = [range(run.first, run.first + run.count) for run in page.runs]
                end = min(last, held[-1].stop - 1) if page.more and held else last
            else:
                break
            for begin in range(at, end + 1, COMPARED_AT_ONCE):
                until = min(end, begin + COMPARED_AT_ONCE - 1)
                lacking = missing(striped(metadata, seat, begin, until), held)
                self.findings.missing_entries += sum(map(len, lacking))
                _extend(bad, member, lacking, partial(quorum.run_of, seat))
                if len(bad) > RANGES_MAX:
                    bad = list(joined(bad))
                await asyncio.sleep(0)
            at = end + 1
        return bad


def _extend(
    bad: list[BadCopy], member: Member, lacking: Sequence[range], run_of: Callable[[int], range]
) -> None:
    """Append the runs that the member lacks. `run_of`: see `Quorum.run_of`."""
    for run in lacking:
        begin = run.start
        if bad and run_of(bad[-1].last_entry + 1).start == begin:
            begin = bad.pop().first_entry  # the seat holds no entry in between: join
        bad.append(BadCopy(member, EntryId(begin), EntryId(run.stop - 1)))
