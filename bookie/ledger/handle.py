"""LedgerReader: reads confirmed entries of one ledger from its replicas."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from magnetar.bookie.contract import ReadRequest
from magnetar.bookie.ledger.bad_copies import is_bad_copy
from magnetar.bookie.ledger.errors import BookieUnavailable, EntryUnreadable
from magnetar.bookie.ledger.quorum import quorum_of, seats
from magnetar.bookie.ledger.reader import (
    NEGATIVE,
    Ask,
    Deliver,
    GiveUp,
    LedgerEntry,
    RangeRead,
    Refresh,
    Standing,
    outranking,
    sound_prefix,
    sound_stripes,
    standing,
    windows,
)
from magnetar.metadata.errors import InvalidRecord, OutcomeUnknown, Unavailable
from magnetar.metadata.model import EntryId, LedgerId, LedgerState
from magnetar.protos.envelope import ENVELOPE, BookieCode, FrameDamaged
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from magnetar.bookie.ledger.reader import Action
    from magnetar.bookie.ledger.reading import ReadServices
    from magnetar.metadata.model import LedgerMetadata, Member
    from magnetar.runtime.frames import Buffer

    Answer = tuple[Member, list[LedgerEntry], BookieCode]

log = get_logger(__name__)

ENTRY_BYTES_GUESS: Final = 1024
"""The estimated size of an envelope before the first read of an open striped ledger."""

_UNWELL: Final = frozenset(
    {BookieCode.TIMEOUT, BookieCode.CONNECTION_LOST, BookieCode.OVERLOADED, BookieCode.STOPPING}
)


class LedgerReader:
    """Several reads may run at a time. The caller ensures that it reads confirmed entries only."""

    def __init__(
        self,
        metadata: LedgerMetadata,
        services: ReadServices,
        *,
        fence: bool = False,
        favourite: Member | None = None,
    ) -> None:
        """`favourite`: the replica to ask first among equally good ones. None: any."""
        self.metadata = metadata  # replaced when replicas have moved
        self._services = services
        self._fence = fence  # (recovery fences with every read)
        # After a read, this is the replica that answered: its disk cache may hold the next entries.
        self._favourite = favourite
        self._entry_bytes = _mean_entry_bytes(metadata)  # an estimate

    async def read(self, first: int, last: int, *, bytes_max: int) -> list[LedgerEntry]:
        """Return entries first, first + 1, … up to `last`: about `bytes_max` payload bytes, and at
        least one entry. Raises EntryUnreadable if the first entry cannot be read now."""
        assert 0 <= first <= last
        assert bytes_max > 0
        if self.metadata.ensemble_size == self.metadata.write_quorum:
            return await self._read_run(first, last, bytes_max)
        return await self._read_striped(first, last, bytes_max)

    async def _read_striped(self, first: int, last: int, bytes_max: int) -> list[LedgerEntry]:
        """Read in stripes, each from one bookie. If that fails, read several windows at a time."""
        size = self.metadata.write_quorum
        entries: list[LedgerEntry] = []
        while first <= last and bytes_max > 0:
            stripes = await self._read_stripes(first, last, bytes_max)
            if stripes:
                entries += stripes
                first += len(stripes)
                bytes_max -= sum(len(entry.payload) for entry in stripes)
                continue
            asked, share = windows(
                first,
                last,
                size=size,
                entry_bytes=self._entry_bytes,
                bytes_max=bytes_max,
            )
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._try_run(*each, share)) for each in asked]
            for (begin, _), task in zip(asked, tasks, strict=True):
                if begin != first or bytes_max <= 0:
                    break  # the previous window was cut short, or the entries are enough
                part = task.result()
                if isinstance(part, EntryUnreadable):
                    if not entries:
                        raise part
                    return entries  # the next call raises the error
                entries += part
                first += len(part)
                bytes_max -= sum(len(entry.payload) for entry in part)
            self._entry_bytes = sum(len(entry.envelope) for entry in entries) / len(entries)
        return entries

    async def _read_stripes(self, first: int, last: int, bytes_max: int) -> list[LedgerEntry]:
        """Ask healthy bookies that together hold the range, with one request for each part of
        `Quorum.cover`. Return the entries before the first missing or damaged entry. The caller
        continues there."""
        metadata, quorum = self.metadata, quorum_of(self.metadata)
        last = min(last, self._segment_end(metadata, first))
        last = min(last, first + max(round(bytes_max / self._entry_bytes), 1) - 1)
        members = metadata.segment_of(EntryId(first)).members
        well = seats(n for n, each in enumerate(members) if self._standing(each) is Standing.WELL)
        parts = quorum.cover(first, well)
        if last - first < quorum.write_quorum or parts is None:
            return []  # one window is enough, or healthy bookies lack a part
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    self._ask_stripe(
                        members[seat],
                        ReadRequest(
                            incarnation=members[seat].incarnation,
                            ledger=metadata.ledger,
                            master_key=metadata.master_key,
                            first=first + offset,
                            last=last,
                            run=length,
                            stride=quorum.ensemble_size,
                            bytes_max=-(-2 * bytes_max * length // quorum.ensemble_size),
                            fence=self._fence,
                        ),
                        sealed=_is_sealed(metadata, first),
                    )
                )
                for offset, length, seat in parts
                if first + offset <= last
            ]
        found: dict[int, LedgerEntry] = {}
        for task in tasks:
            found |= task.result()
        entries = [found[entry] for entry in _run_from(first, found)]
        if entries:
            self._entry_bytes = sum(len(entry.envelope) for entry in entries) / len(entries)
        return entries

    async def _ask_stripe(
        self, member: Member, request: ReadRequest, *, sealed: bool
    ) -> dict[int, LedgerEntry]:
        """Return the sound entries of the answer, or of its part before the bookie is silent for
        `speculative_read_s`."""
        wanted = (
            entry
            for begin in range(request.first, request.last + 1, request.stride)
            for entry in range(begin, min(begin + request.run, request.last + 1))
        )
        loop, delay_s = asyncio.get_running_loop(), self._services.config.speculative_read_s
        frames: list[Buffer] = []
        try:
            async with asyncio.timeout(delay_s) as timer:
                async for frame in self._services.pool.peer(member).read(request):
                    frames.append(frame)
                    timer.reschedule(loop.time() + delay_s)
        except (TimeoutError, BookieUnavailable, StreamClosed):
            self._services.health.on_slow(member, loop.time())
        try:
            entries, refused = sound_stripes(request.ledger, wanted, frames)
        except FrameDamaged:
            return {}
        if refused is not None and is_bad_copy(refused[1], sealed=sealed):
            bad = EntryId(refused[0])
            self._services.bad_copies.on_bad_copy(LedgerId(request.ledger), bad, member)
        return entries

    async def _try_run(
        self, first: int, last: int, bytes_max: int
    ) -> list[LedgerEntry] | EntryUnreadable:
        try:
            return await self._read_run(first, last, bytes_max)
        except EntryUnreadable as error:
            return error

    async def _read_run(self, first: int, last: int, bytes_max: int) -> list[LedgerEntry]:
        """Ask the replicas in order until one answers, and return its entries. Raises
        EntryUnreadable."""
        loop, metadata = asyncio.get_running_loop(), self.metadata
        machine = RangeRead(
            self._replicas(metadata, first, last),
            speculate_after_s=self._services.config.speculative_read_s,
        )
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        refreshed = _Refreshed(None, known=False)
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
                                sealed = _is_sealed(metadata, first)
                                asking.append(
                                    group.create_task(self._ask(member, request, sealed, answers))
                                )
                            case Refresh():
                                refreshed = await self._refresh()
                                metadata = refreshed.metadata or metadata
                            case Deliver() | GiveUp():
                                result = action
                    if Refresh() in actions:
                        replicas = self._replicas(metadata, first, last)
                        moved = replicas if refreshed.metadata is not None else []
                        actions = machine.on_refreshed(moved, loop.time())
                    elif result is None:
                        actions = await self._next(machine, answers)
            finally:
                for task in asking:
                    task.cancel()
        return self._outcome(first, machine, result, refreshed)

    def _outcome(
        self, first: int, machine: RangeRead, result: Deliver | GiveUp, refreshed: _Refreshed
    ) -> list[LedgerEntry]:
        answers: dict[str, BookieCode] = {m.bookie: code for m, code in machine.answers.items()}
        if answers:
            told = {bookie: code.name for bookie, code in answers.items()}
            number = self.metadata.ledger
            log.warning("replicas returned no entry", ledger=number, entry=first, answers=told)
        if isinstance(result, GiveUp):
            denied = outranking(answers.values()) in NEGATIVE
            there = refreshed.metadata is not None
            raise EntryUnreadable(
                self.metadata.ledger,
                first,
                answers,
                missing=denied and there,  # (otherwise the replicas may have moved)
                deleted=refreshed.known and not there,
            )
        self._favourite = result.member
        return list(result.entries)

    async def _next(self, machine: RangeRead, answers: asyncio.Queue[Answer]) -> list[Action]:
        """Return the actions after the next answer, or after the machine's timer if no answer
        arrives before."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(machine.timer_at()):
                member, entries, code = await answers.get()
        except TimeoutError:
            for slow in machine.asking:
                self._services.health.on_slow(slow, loop.time())
            return machine.on_tick(loop.time())
        if entries:
            return machine.on_entries(member, entries)
        if code in _UNWELL:
            self._services.health.on_slow(member, loop.time())
        return machine.on_refused(member, code, loop.time())

    async def _ask(
        self, member: Member, request: ReadRequest, sealed: bool, answers: asyncio.Queue[Answer]
    ) -> None:
        """Ask one replica and put its answer into `answers`. An answer that breaks off counts with
        the entries that arrived. Notes a bad copy."""
        entries: list[LedgerEntry] = []
        code, damaged = BookieCode.OK, False
        try:
            async with asyncio.timeout(self._services.config.read_timeout_s):
                async for frame in self._services.pool.peer(member).read(request):
                    if code is not BookieCode.OK or damaged:
                        continue
                    following = request.first + len(entries)
                    try:  # verify at once, while the next frame travels
                        found, code = sound_prefix(request.ledger, following, [frame])
                        entries += found
                    except FrameDamaged:
                        damaged = True
            if damaged:
                code = BookieCode.CORRUPT
            elif is_bad_copy(code, sealed=sealed):
                bad = EntryId(request.first + len(entries))
                self._services.bad_copies.on_bad_copy(LedgerId(request.ledger), bad, member)
        except TimeoutError:
            code = BookieCode.TIMEOUT
        except BookieUnavailable as error:
            code = error.code
        except StreamClosed:
            code = BookieCode.CONNECTION_LOST
        if not entries and code is BookieCode.OK:
            code = BookieCode.CORRUPT  # an answer has at least one entry
        answers.put_nowait((member, entries, code))

    def _request(
        self, metadata: LedgerMetadata, member: Member, first: int, last: int, bytes_max: int
    ) -> ReadRequest:
        return ReadRequest(
            incarnation=member.incarnation,
            ledger=metadata.ledger,
            master_key=metadata.master_key,
            first=first,
            last=min(last, self._run_end(metadata, member, first)),
            bytes_max=bytes_max,
            fence=self._fence,
        )

    def _run_end(self, metadata: LedgerMetadata, member: Member, first: int) -> int:
        """Return the last entry of the run from `first` that this replica holds."""
        segment = metadata.segment_of(EntryId(first))
        run = quorum_of(metadata).run_of(segment.members.index(member), first)
        return min(run.stop - 1, self._segment_end(metadata, first))

    @staticmethod
    def _segment_end(metadata: LedgerMetadata, entry: int) -> int:
        """Return the last entry that the entry's segment can hold."""
        following = (part.first_entry for part in metadata.segments if part.first_entry > entry)
        return next(following, 1 << 62) - 1

    def _standing(self, member: Member) -> Standing:
        grade = self._services.health.grade(member, asyncio.get_running_loop().time())
        return standing(self._services.directory.listed.get(member), grade)

    def _replicas(self, metadata: LedgerMetadata, first: int, last: int) -> list[Member]:
        """Return the members that hold the first entry, in order of preference. The criteria are,
        in this order: likely to answer, in the same zone, holds more of the range, answered the
        previous read. The remaining order is random."""
        members = metadata.segment_of(EntryId(first)).members
        replicas = [members[seat] for seat in quorum_of(metadata).write_order(first)]
        services = self._services
        listed, zone = services.directory.listed, services.config.zone

        def rank(member: Member) -> tuple[Standing, bool, int, bool]:
            registration = listed.get(member)
            is_far = bool(zone) and (registration is None or registration.zone != zone)
            short_by = last - min(last, self._run_end(metadata, member, first))
            return self._standing(member), is_far, short_by, member != self._favourite

        services.random.shuffle(replicas)
        replicas.sort(key=rank)
        return replicas

    async def _refresh(self) -> _Refreshed:
        try:
            stored = await self._services.records.get(self.metadata.ledger)
        except (Unavailable, OutcomeUnknown, InvalidRecord) as error:
            log.warning("ledger's metadata not read", error=str(error))
            return _Refreshed(None, known=False)
        if stored is not None:
            self.metadata = stored
        return _Refreshed(stored, known=True)


@dataclass(frozen=True, slots=True)
class _Refreshed:
    metadata: LedgerMetadata | None  # None: deleted, or not known
    known: bool  # False: the metadata could not be read


def _run_from(first: int, found: Mapping[int, LedgerEntry]) -> Iterator[int]:
    """Yield the found entries up to the first gap."""
    while first in found:
        yield first
        first += 1


def _is_sealed(metadata: LedgerMetadata, entry: int) -> bool:
    closed = metadata.state is LedgerState.CLOSED
    return closed or entry < metadata.last_segment.first_entry


def _mean_entry_bytes(metadata: LedgerMetadata) -> float:
    """Return the mean size of the envelopes according to the metadata."""
    if metadata.length is None or metadata.last_entry is None or metadata.last_entry < 0:
        return ENTRY_BYTES_GUESS
    return ENVELOPE.size + metadata.length / (metadata.last_entry + 1)
