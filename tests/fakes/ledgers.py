"""Ledgers in memory, with fencing: the contract that `magnetar.bookie.ledger` has with a broker,
and its failures.

One `SharedLedgers` replaces the bookies and the ledgers' metadata; each broker has a `FakeLedgers`
on it. The next turn of the loop stores and confirms all entries that have gathered, unless the test
controls the acknowledgements (`hold`, `release`) or breaks something (`fail`, `bookies`,
`unreadable`). `Steps` kills a broker at its n-th call, before or after the call takes effect.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from fakes.stray import stray

from magnetar.bookie.ledger.errors import (
    EntryTooLarge,
    EntryUnreadable,
    LedgerClosed,
    LedgerError,
    LedgerFenced,
    LedgerNotFound,
    NotEnoughBookies,
    QuorumTimeout,
    RecoveryIncomplete,
)
from magnetar.metadata.errors import OutcomeUnknown, Unavailable
from magnetar.metadata.model import (
    BookieId,
    EntryId,
    LedgerId,
    LedgerMetadata,
    LedgerState,
    Member,
    Segment,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from magnetar.bookie.ledger.quorum import Quorum

    Buffer = bytes | bytearray | memoryview

ENTRY_BYTES_MAX: Final = 5_253_120


class BrokerDied(Exception):
    """Raised out of every call of a broker that `Steps` has killed."""


class Steps:
    """Counts a broker's calls to the outside. Call number `at` (from 0) fails: before it takes
    effect, or afterwards but before the broker learns of it. The broker dies there; with `fails`,
    the call instead raises an error that it may raise. A dead broker does nothing."""

    def __init__(
        self,
        at: int | None = None,
        *,
        after: bool = False,
        fails: bool = False,
        on_step: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.at = at
        self.after = after
        self.fails = fails
        self.on_step = on_step  # called with the number of each call, before it
        self.taken: list[str] = []
        self.dead = False

    def before(self, what: str) -> bool:
        """Raise if the call fails without effect. Return True if the caller must `bite` after the
        call."""
        if self.dead:
            raise BrokerDied(what)
        self.on_step(len(self.taken))
        self.taken.append(what)
        if self.at is None or len(self.taken) - 1 != self.at:
            return False
        if self.after:
            return True
        self.bite(what)
        return False

    def bite(self, what: str) -> None:
        if not self.fails:
            self.dead = True
            raise BrokerDied(what)
        match what:
            case "metadata.get":
                raise Unavailable("a fault")
            case "ledgers.recover":
                raise RecoveryIncomplete(0, "a fault")
            case "bookies.write":
                raise QuorumTimeout(0, 0, 1.0)
            case _:
                raise OutcomeUnknown(what, "a fault")


@dataclass(slots=True)
class StoredLedger:
    metadata: LedgerMetadata
    entries: list[bytes] = field(default_factory=list)  # the entries that the bookies hold
    confirmed: int = -1
    fenced: bool = False


@dataclass(frozen=True, slots=True)
class FakeEntry:
    entry: EntryId
    payload: memoryview


class SharedLedgers:
    """The bookies, and the metadata of ledgers."""

    def __init__(self) -> None:
        self.ledgers: dict[int, StoredLedger] = {}
        self.deleted: list[int] = []
        self.appenders: list[FakeAppender] = []
        self.reads: list[tuple[int, int, int]] = []  # ledger, first, last; ranges read from bookies
        # The unreadable entries at present; they may be readable later.
        self.unreadable: set[tuple[int, int]] = set()
        self.lost: set[tuple[int, int]] = set()  # every bookie said that it does not have the entry
        self.bookies = True  # False: no ledger can be created, recovered or closed
        self.full_ensemble = True  # False: new ledgers are degraded
        self.held = False
        # "create", "close", "read": the next call of this kind is cancelled without an owner
        self.strays: set[str] = set()
        self.reading = asyncio.Event()  # set when a reader has requested entries
        self.may_read = asyncio.Event()  # cleared: reads wait
        self.may_read.set()
        self._next = 0

    def hold(self) -> None:
        """Store and confirm no more entries until `release`."""
        self.held = True

    def release(self) -> None:
        self.held = False
        for appender in self.appenders:
            appender.flush_soon()

    async def maybe_stray(self, call: str) -> None:
        """End as if the awaited future was cancelled, and not the task of the call."""
        if call in self.strays:
            self.strays.remove(call)
            await stray()

    async def wait_read(self) -> None:
        self.reading.set()
        await self.may_read.wait()
        await self.maybe_stray("read")

    def next_id(self, newer_than: int) -> LedgerId:
        self._next = max(self._next, newer_than) + 1
        return LedgerId(self._next)

    def stored(self, ledger: int) -> StoredLedger:
        if ledger not in self.ledgers:
            raise LedgerNotFound(ledger)
        return self.ledgers[ledger]

    def live_appender(self) -> FakeAppender:
        """The newest appender that still writes."""
        return next(a for a in reversed(self.appenders) if a.failure is None and not a.closed)

    def close(self, ledger: int, last: int) -> LedgerMetadata:
        stored = self.stored(ledger)
        if stored.metadata.state is not LedgerState.CLOSED:
            stored.fenced = True
            assert last >= stored.confirmed, "closed before a confirmed entry"
            del stored.entries[last + 1 :]
            length = sum(len(entry) for entry in stored.entries)
            stored.metadata = replace(
                stored.metadata,
                state=LedgerState.CLOSED,
                last_entry=EntryId(last),
                length=length,
            )
        return stored.metadata

    def read(self, ledger: int, first: int, last: int, bytes_max: int) -> list[FakeEntry]:
        stored = self.stored(ledger)
        assert 0 <= first <= last < len(stored.entries), (ledger, first, last)
        self.reads.append((ledger, first, last))
        found: list[FakeEntry] = []
        size = 0
        for entry in range(first, last + 1):
            if (ledger, entry) in self.unreadable or (ledger, entry) in self.lost:
                break
            payload = stored.entries[entry]
            size += len(payload)
            if found and size > bytes_max:
                break
            found.append(FakeEntry(EntryId(entry), memoryview(payload)))
        if not found:
            raise EntryUnreadable(ledger, first, {}, missing=(ledger, first) in self.lost)
        return found


class FakeAppender:
    def __init__(
        self, world: SharedLedgers, ledger: LedgerId, steps: Steps, *, degraded: bool
    ) -> None:
        self.ledger = ledger
        self.confirmed = EntryId(-1)
        self.appended = EntryId(-1)
        self.length = 0
        self.failure: LedgerError | None = None
        self.degraded = degraded
        self.trouble = ""
        self.closed = False
        self.progress: Callable[[], None] = lambda: None
        self._world = world
        self._steps = steps
        self._pending: list[bytes] = []
        self._scheduled = False
        self._moved = asyncio.Event()

    @property
    def in_flight_bytes(self) -> int:
        return sum(len(payload) for payload in self._pending)

    def append_nowait(self, payloads: Sequence[Sequence[Buffer]]) -> EntryId:
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise LedgerClosed(self.ledger)
        assert payloads
        largest = max(sum(map(len, parts)) for parts in payloads)
        if largest > ENTRY_BYTES_MAX:
            raise EntryTooLarge(largest, ENTRY_BYTES_MAX)
        first = EntryId(self.appended + 1)
        self._pending += [b"".join(parts) for parts in payloads]
        self.appended = EntryId(self.appended + len(payloads))
        self.flush_soon()
        return first

    has_room = True

    async def wait_room(self) -> None:
        await asyncio.sleep(0)

    async def read(self, first: EntryId, last: EntryId, *, bytes_max: int) -> list[FakeEntry]:
        await asyncio.sleep(0)
        await self._world.wait_read()
        assert last <= self.confirmed, "a read ends at the confirmed entry"
        return self._world.read(self.ledger, first, last, bytes_max)

    async def close(self) -> LedgerMetadata:
        bites = self._steps.before("appender.close")
        await self._world.maybe_stray("close")
        while self.failure is None and self._pending:
            self._moved.clear()
            await self._moved.wait()
        self.closed = True
        if isinstance(self.failure, LedgerFenced):
            raise self.failure
        if not self._world.bookies:
            raise RecoveryIncomplete(self.ledger, "no bookies")
        stored = self._world.stored(self.ledger)
        if stored.fenced and stored.metadata.last_entry != self.confirmed:
            raise LedgerFenced(self.ledger, "closed by another broker")
        metadata = self._world.close(self.ledger, self.confirmed)
        if bites:
            self._steps.bite("appender.close")
        return metadata

    def abandon(self) -> None:
        self.closed = True
        self._pending.clear()

    def fail(self, error: LedgerError, *, stored: int = 0) -> None:
        """Fail the ledger. The first `stored` entries in flight still reach the bookies: they are
        unconfirmed, and recovery finds them."""
        kept = self._world.stored(self.ledger)
        kept.entries.extend(self._pending[:stored])
        self._pending.clear()
        self.failure = error
        asyncio.get_running_loop().call_soon(self._moving)

    def flush_soon(self) -> None:
        if self._pending and not self._scheduled and not self._world.held:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self._world.held or self.failure is not None or not self._pending:
            return
        try:
            bites = self._steps.before("bookies.write")
        except BrokerDied:
            return
        except LedgerError as error:
            self.fail(error)
            return
        stored = self._world.ledgers.get(self.ledger)
        if stored is None or stored.fenced:
            self.failure = LedgerFenced(self.ledger, "fenced by a bookie")
            self._pending.clear()
        else:
            if bites:
                self._go_wrong()
                return
            stored.entries.extend(self._pending)
            self.length += sum(len(payload) for payload in self._pending)
            self._pending.clear()
            self.confirmed = EntryId(len(stored.entries) - 1)
            stored.confirmed = self.confirmed
        self._moving()

    def _go_wrong(self) -> None:
        """Store the entries on the bookies; the writer does not learn of it."""
        try:
            self._steps.bite("bookies.write")
        except BrokerDied:
            self._world.stored(self.ledger).entries.extend(self._pending)
        except LedgerError as error:
            self.fail(error, stored=len(self._pending))

    def _moving(self) -> None:
        self._moved.set()
        self.progress()


class FakeReader:
    def __init__(self, world: SharedLedgers, metadata: LedgerMetadata) -> None:
        assert metadata.state is LedgerState.CLOSED
        self._world = world
        self._ledger = metadata.ledger

    async def read(self, first: EntryId, last: EntryId, *, bytes_max: int) -> list[FakeEntry]:
        await asyncio.sleep(0)
        await self._world.wait_read()
        return self._world.read(self._ledger, first, last, bytes_max)


class FakeLedgers:
    """A broker's access to the ledgers."""

    def __init__(self, world: SharedLedgers, steps: Steps | None = None) -> None:
        self.world = world
        self.steps = steps if steps is not None else Steps()
        self.quorums: list[Quorum | None] = []  # properties of the new ledgers that were requested

    async def create(
        self, *, newer_than: LedgerId, custom: Mapping[str, bytes], quorum: Quorum | None = None
    ) -> FakeAppender:
        self.quorums.append(quorum)
        bites = self.steps.before("ledgers.create")
        await asyncio.sleep(0)
        await self.world.maybe_stray("create")
        if not self.world.bookies:
            raise NotEnoughBookies(needed=1, writable=0)
        ledger = self.world.next_id(newer_than)
        member = Member(BookieId("b1"), "0" * 32)
        self.world.ledgers[ledger] = StoredLedger(
            LedgerMetadata(
                ledger=ledger,
                state=LedgerState.OPEN,
                ensemble_size=1,
                write_quorum=1,
                ack_quorum=1,
                segments=(Segment(EntryId(0), (member,)),),
                master_key=0,
                creator_token=0,
                created_ms=0,
                custom=custom,
            )
        )
        if bites:
            self.steps.bite("ledgers.create")
        degraded = not self.world.full_ensemble
        appender = FakeAppender(self.world, ledger, self.steps, degraded=degraded)
        self.world.appenders.append(appender)
        return appender

    async def recover(self, ledger: LedgerId) -> LedgerMetadata:
        bites = self.steps.before("ledgers.recover")
        await asyncio.sleep(0)
        stored = self.world.stored(ledger)
        stored.fenced = True
        if not self.world.bookies and stored.metadata.state is not LedgerState.CLOSED:
            raise RecoveryIncomplete(ledger, "no bookies")
        metadata = self.world.close(ledger, len(stored.entries) - 1)
        if bites:
            self.steps.bite("ledgers.recover")
        return metadata

    async def metadata(self, ledger: LedgerId) -> LedgerMetadata | None:
        bites = self.steps.before("ledgers.metadata")
        await asyncio.sleep(0)
        if bites:
            self.steps.bite("ledgers.metadata")
        stored = self.world.ledgers.get(ledger)
        return None if stored is None else stored.metadata

    def reader(self, metadata: LedgerMetadata) -> FakeReader:
        return FakeReader(self.world, metadata)

    async def delete(self, ledger: LedgerId) -> None:
        bites = self.steps.before("ledgers.delete")
        await asyncio.sleep(0)
        if self.world.ledgers.pop(ledger, None) is not None:
            self.world.deleted.append(ledger)
        if bites:
            self.steps.bite("ledgers.delete")

    def full_ensemble_possible(self, quorum: Quorum | None = None) -> bool:
        return self.world.full_ensemble
