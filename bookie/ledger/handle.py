"""LedgerReader: confirmed entries of one ledger, from whichever replica gives them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from magnetar.bookie.contract import ReadRequest
from magnetar.bookie.ledger.errors import BookieUnavailable, EntryUnreadable
from magnetar.bookie.ledger.reader import (
    NEGATIVE,
    Ask,
    Deliver,
    GiveUp,
    LedgerEntry,
    RangeRead,
    Refresh,
    outranking,
    sound_prefix,
)
from magnetar.bookie.ledger.services import quorum_of
from magnetar.metadata.errors import InvalidRecord, OutcomeUnknown, Unavailable
from magnetar.metadata.model import EntryId
from magnetar.protos.envelope import BookieCode, FrameDamaged, decode_read_answers
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from magnetar.bookie.ledger.reader import Action
    from magnetar.bookie.ledger.services import Services
    from magnetar.metadata.model import LedgerMetadata, Member

    Answer = tuple[Member, list[LedgerEntry], BookieCode]

log = get_logger(__name__)


class LedgerReader:
    """Reads may run side by side. Never reads beyond what the caller knows to be confirmed: that is
    the caller's to see to."""

    def __init__(
        self, metadata: LedgerMetadata, services: Services, *, fence: bool = False
    ) -> None:
        self.metadata = metadata  # what is read from; replaced when replicas have moved
        self._services = services
        self._fence = fence  # (recovery fences with every read)
        self._favourite: Member | None = None  # who gave the last answer: it reads ahead for us
        self._quorum = quorum_of(metadata)

    async def read(self, first: int, last: int, *, bytes_max: int) -> list[LedgerEntry]:
        """Entries first, first + 1, … up to `last`, as far as about `bytes_max` payload bytes go:
        at least one. Raises EntryUnreadable if not even the first can be read now."""
        assert 0 <= first <= last
        assert bytes_max > 0
        entries: list[LedgerEntry] = []
        while first <= last and bytes_max > 0:
            try:
                run = await self._read_run(first, last, bytes_max)
            except EntryUnreadable:
                if not entries:
                    raise
                break  # it comes again with the next call
            entries += run
            first += len(run)
            bytes_max -= sum(len(entry.payload) for entry in run)
            if self._quorum.ensemble_size == self._quorum.write_quorum:
                break  # else each bookie has gaps, and a run is as short as the stripes are
        return entries

    async def _read_run(self, first: int, last: int, bytes_max: int) -> list[LedgerEntry]:
        """What one replica gives."""
        loop, metadata = asyncio.get_running_loop(), self.metadata
        machine = RangeRead(
            self._replicas(metadata, first),
            speculate_after_s=self._services.config.speculative_read_s,
        )
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        result: Deliver | GiveUp | None = None
        async with asyncio.TaskGroup() as group:  # none of its tasks fails
            asking: list[asyncio.Task[None]] = []
            actions: list[Action] = machine.begin(loop.time())
            try:
                while result is None:
                    for action in actions:
                        match action:
                            case Ask(member):
                                request = self._request(metadata, member, first, last, bytes_max)
                                asking.append(
                                    group.create_task(self._ask(member, request, answers))
                                )
                            case Refresh():
                                metadata = await self._refresh()
                            case Deliver() | GiveUp():
                                result = action
                    if Refresh() in actions:
                        replicas = self._replicas(metadata, first)
                        actions = machine.on_refreshed(replicas, loop.time())
                    elif result is None:
                        actions = await self._next(machine, answers)
            finally:
                for task in asking:
                    task.cancel()
        return self._outcome(first, machine, result)

    def _outcome(
        self, first: int, machine: RangeRead, result: Deliver | GiveUp
    ) -> list[LedgerEntry]:
        answers: dict[str, BookieCode] = {m.bookie: code for m, code in machine.answers.items()}
        if answers:
            told = {bookie: code.name for bookie, code in answers.items()}
            log.warning("replicas of no use", ledger=self.metadata.ledger, entry=first, said=told)
        if isinstance(result, GiveUp):
            missing = outranking(answers.values()) in NEGATIVE
            raise EntryUnreadable(self.metadata.ledger, first, answers, missing=missing)
        self._favourite = result.member
        return list(result.entries)

    @staticmethod
    async def _next(machine: RangeRead, answers: asyncio.Queue[Answer]) -> list[Action]:
        """What follows from the next answer, or from none coming for too long."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(machine.timer_at()):
                member, entries, code = await answers.get()
        except TimeoutError:
            return machine.on_tick(loop.time())
        if entries:
            return machine.on_entries(member, entries)
        return machine.on_refused(member, code, loop.time())

    async def _ask(
        self, member: Member, request: ReadRequest, answers: asyncio.Queue[Answer]
    ) -> None:
        """Ask one replica, and put what it says into `answers`."""
        entries: list[LedgerEntry] = []
        try:
            async with asyncio.timeout(self._services.config.read_timeout_s):
                frames = [f async for f in self._services.pool.peer(member).read(request)]
            found = (answer for frame in frames for answer in decode_read_answers(frame))
            entries, code = sound_prefix(request.ledger, request.first, found)
        except TimeoutError:
            code = BookieCode.TIMEOUT
        except BookieUnavailable as error:
            code = error.code
        except StreamClosed:
            code = BookieCode.CONNECTION_LOST
        except FrameDamaged:
            code = BookieCode.CORRUPT
        if not entries and code is BookieCode.OK:
            code = BookieCode.CORRUPT  # an answer has one entry at least
        answers.put_nowait((member, entries, code))

    def _request(
        self, metadata: LedgerMetadata, member: Member, first: int, last: int, bytes_max: int
    ) -> ReadRequest:
        """As much of the range as this replica holds without a gap."""
        segment = metadata.segment_of(EntryId(first))
        run = self._quorum.run_of(segment.members.index(member), first)
        following = (part.first_entry for part in metadata.segments if part.first_entry > first)
        return ReadRequest(
            incarnation=member.incarnation,
            ledger=metadata.ledger,
            master_key=metadata.master_key,
            first=first,
            last=min(last, run.stop - 1, next(following, run.stop) - 1),
            bytes_max=bytes_max,
            fence=self._fence,
        )

    def _replicas(self, metadata: LedgerMetadata, entry: int) -> list[Member]:
        """Who holds the entry: the favourite, then those who are likely to answer, else by lot."""
        members = metadata.segment_of(EntryId(entry)).members
        replicas = [members[seat] for seat in self._quorum.write_order(entry)]
        self._services.random.shuffle(replicas)
        writable = self._services.directory.is_writable
        replicas.sort(key=lambda member: (member != self._favourite, not writable(member)))
        return replicas

    async def _refresh(self) -> LedgerMetadata:
        try:
            stored = await self._services.records.get(self.metadata.ledger)
        except (Unavailable, OutcomeUnknown, InvalidRecord) as error:
            log.warning("ledger's metadata not read", error=str(error))
        else:
            self.metadata = stored or self.metadata
        return self.metadata
