"""The collector with metadata that is wrong, unreachable or late, or that changes during a
round."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest
from fakes import bookies
from fakes.bookies import Bookie, add, running_bookie
from fakes.virtual_loop import stand_still

from magnetar.bookie.collector import PAGE, Collector, CollectorConfig
from magnetar.bookie.reclaimer import Reclaimer
from magnetar.bookie.repair.under_replication_records import UnderReplicationRecords
from magnetar.bookie.storage.format import tombstone_key
from magnetar.metadata import paths
from magnetar.metadata.codec import encode_cluster, encode_ledger, encode_ledger_counter
from magnetar.metadata.errors import Unavailable
from magnetar.metadata.memory import MemoryStore, MemoryTree
from magnetar.metadata.model import (
    BookieId,
    EntryId,
    LedgerId,
    LedgerMetadata,
    LedgerState,
    Member,
    Segment,
)
from magnetar.metadata.store import ABSENT
from magnetar.protos.envelope import COPY, BookieCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from magnetar.bookie.storage.store import Put
    from magnetar.metadata.node import Versioned

IDENTITY = replace(bookies.IDENTITY, cluster="c" * 32)
HERE = Member(BookieId(IDENTITY.bookie), IDENTITY.incarnation)
FORMER = Member(HERE.bookie, "e" * 32)
THERE = Member(BookieId("b2"), "b" * 32)
CONFIG = CollectorConfig(interval_s=10, grace_s=60, tombstones_kept_s=1000, looks_per_s=1e6)


class Metadata(MemoryStore):
    """A store that can hide ledgers from listings, fail at a path, and report reads."""

    def __init__(self, tree: MemoryTree) -> None:
        super().__init__(tree)
        self.hidden: set[str] = set()
        self.away_at = ""
        self.on_get: Callable[[str], Awaitable[None]] | None = None

    async def children(self, path: str) -> list[str]:
        self._maybe_fail(path)
        return [name for name in await super().children(path) if name not in self.hidden]

    async def get(self, path: str) -> Versioned | None:
        self._maybe_fail(path)
        if self.on_get is not None:
            await self.on_get(path)
        return await super().get(path)

    def _maybe_fail(self, path: str) -> None:
        if self.away_at and path.startswith(self.away_at):
            raise Unavailable("away")


class CollectorRig:
    """The collector of a running bookie, and the metadata that the collector reads."""

    def __init__(self, bookie: Bookie, *, page: int) -> None:
        self.bookie = bookie
        self.tree = MemoryTree()
        self.store = Metadata(self.tree)
        self.elsewhere = MemoryStore(self.tree)
        self.clock = bookie.service._admission._clock
        self.formers = {FORMER.incarnation: None}
        service = bookie.service
        thread = service._read_thread
        self.reclaimer = Reclaimer(bookie.storage, thread=thread)
        self.collector = Collector(
            identity=IDENTITY,
            storage=bookie.storage,
            commit=bookie.commit,
            admission=service._admission,
            metadata=self.store,
            under_replication=UnderReplicationRecords(self.store, self.clock),
            reclaimer=self.reclaimer,
            clock=self.clock,
            chance=Random(1),
            read_thread=thread,
            formers=self.formers,
            remove_former=self.formers.pop,
            config=CONFIG,
            page=page,
        )

    async def begin(self, *stored: int, handed_out: int = 1000) -> None:
        await self.elsewhere.put(paths.CLUSTER, encode_cluster(IDENTITY.cluster), expected=ABSENT)
        counter = encode_ledger_counter(LedgerId(handed_out))
        await self.elsewhere.put(paths.NEXT_LEDGER_ID, counter, expected=ABSENT)
        writer = await self.bookie.connect()
        for ledger in stored:
            await self.keep(ledger)
            assert await writer.add(add(ledger, 0), add(ledger, 1)) == [BookieCode.OK] * 2

    async def keep(self, ledger: int, *members: Member, closed: bool = False) -> None:
        metadata = LedgerMetadata(
            ledger=LedgerId(ledger),
            state=LedgerState.OPEN,
            ensemble_size=1,
            write_quorum=1,
            ack_quorum=1,
            segments=tuple(
                Segment(EntryId(at), (member,)) for at, member in enumerate(members or (HERE,))
            ),
            master_key=1,
            creator_token=1,
            created_ms=1,
        )
        if closed:
            end = EntryId(len(metadata.segments))
            metadata = replace(metadata, state=LedgerState.CLOSED, last_entry=end, length=1)
        path = paths.ledger(LedgerId(ledger))
        stored = await self.elsewhere.get(path)
        version = ABSENT if stored is None else stored.version
        await self.elsewhere.put(path, encode_ledger(metadata), expected=version)

    async def drop(self, *ledgers: int) -> None:
        for ledger in ledgers:
            path = paths.ledger(LedgerId(ledger))
            stored = await self.elsewhere.get(path)
            assert stored is not None
            await self.elsewhere.delete(path, expected=stored.version)

    @property
    def stored(self) -> list[int]:
        return self.bookie.storage.ledgers(-1, ledgers_max=1000)

    @property
    def tombstones(self) -> list[int]:
        return [at for at, _ in self.bookie.storage.tombstones(-1, ledgers_max=1000)]


@asynccontextmanager
async def open_rig(*, inline: bool = False, page: int = PAGE) -> AsyncIterator[CollectorRig]:
    """`inline`: run the work of threads at once, for the virtual loop."""
    async with running_bookie(inline=inline) as bookie:
        yield CollectorRig(bookie, page=page)


@pytest.mark.real_loop
async def test_deleted_ledgers_go_and_leave_tombstones() -> None:
    async with open_rig() as rig:
        await rig.begin(1, 2, 3, 7)
        assert await rig.collector.maybe_round()
        assert rig.stored == [1, 2, 3, 7]
        await rig.drop(2, 7)
        assert await rig.collector.maybe_round()
        assert rig.stored == [1, 3]
        assert rig.tombstones == [2, 7]
        assert rig.bookie.storage.unsynced <= 2  # the tombstones that record the reclaimed space
        writer = await rig.bookie.connect()
        assert await writer.add(add(2, 2)) == [BookieCode.DELETED]
        assert rig.collector.counts.ledgers_deleted == 2


@pytest.mark.real_loop
@pytest.mark.parametrize("away_at", [paths.CLUSTER, paths.LEDGERS, paths.ledger(LedgerId(2))])
async def test_nothing_is_deleted_while_the_metadata_store_is_away(away_at: str) -> None:
    async with open_rig() as rig:
        await rig.begin(1, 2, 3)
        await rig.drop(2)
        rig.store.away_at = away_at
        assert not await rig.collector.maybe_round()
        assert rig.stored == [1, 2, 3]
        rig.store.away_at = ""
        assert await rig.collector.maybe_round()
        assert rig.stored == [1, 3]


@pytest.mark.real_loop
@pytest.mark.parametrize("hidden", [("2",), ("0000",)])
async def test_a_listing_that_lacks_ledgers_deletes_none_of_them(hidden: tuple[str, ...]) -> None:
    async with open_rig() as rig:
        await rig.begin(1, 2, 3)
        await rig.drop(3)
        rig.store.hidden.update(hidden)
        await rig.collector.maybe_round()
        assert rig.stored == [1, 2]


@pytest.mark.real_loop
async def test_nothing_is_deleted_with_the_metadata_of_another_cluster() -> None:
    async with open_rig() as rig:
        await rig.begin(1)
        await rig.drop(1)
        stored = await rig.elsewhere.get(paths.CLUSTER)
        assert stored is not None
        await rig.elsewhere.put(paths.CLUSTER, encode_cluster("d" * 32), expected=stored.version)
        assert not await rig.collector.maybe_round()
        assert rig.stored == [1]


@pytest.mark.real_loop
async def test_nothing_is_deleted_if_the_metadata_has_not_issued_the_id() -> None:
    async with open_rig() as rig:
        await rig.begin(1, 2, handed_out=2)
        await rig.drop(1, 2)
        assert not await rig.collector.maybe_round()
        assert rig.stored == [1, 2]


@pytest.mark.real_loop
@pytest.mark.parametrize("flags", [0, COPY])
async def test_an_entry_with_an_id_that_was_not_issued_aborts_the_round(
    flags: int,
) -> None:
    async with open_rig() as rig:
        await rig.begin(1, handed_out=2)
        await rig.drop(1)
        writer = await rig.bookie.connect()
        await writer.add(add(5, 0, flags=flags))
        assert not await rig.collector.maybe_round()
        assert rig.stored == [1, 5]


@pytest.mark.real_loop
async def test_a_record_of_no_ledger_at_all_is_kept_and_keeps_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_rig() as rig:
        await rig.begin(1, 2, handed_out=3)
        await rig.drop(1)
        rig.bookie.service._admission.fence(7_000_000, 1)
        assert await rig.collector.maybe_round()
        assert rig.stored == [2, 7_000_000]
        assert rig.collector.counts.never_handed_out == 1
        assert "never handed out" in caplog.text


@pytest.mark.real_loop
async def test_nothing_is_deleted_with_metadata_that_never_had_a_ledger() -> None:
    async with open_rig() as rig:
        await rig.begin()
        writer = await rig.bookie.connect()
        await writer.add(add(1, 0))
        assert not await rig.collector.maybe_round()
        assert rig.stored == [1]


@pytest.mark.real_loop
async def test_a_ledger_that_begins_during_the_round_stays() -> None:
    async with open_rig() as rig:
        await rig.begin(1)
        writer = await rig.bookie.connect()

        async def begin_another(path: str) -> None:
            if path == paths.CLUSTER:  # the stored ledgers are listed, the metadata is not
                rig.store.on_get = None
                await rig.keep(5)
                await writer.add(add(5, 0))

        rig.store.on_get = begin_another
        assert await rig.collector.maybe_round()
        assert rig.stored == [1, 5]


async def test_a_left_over_copy_is_deleted_in_the_second_round_without_a_tombstone() -> None:
    async with open_rig(inline=True) as rig:
        await rig.begin(1, 2, 3, 4)
        await rig.keep(1, THERE, closed=True)
        await rig.keep(2, THERE, HERE, closed=True)
        await rig.keep(3, THERE)  # open: its writer may take this bookie back
        assert await rig.collector.maybe_round()
        assert rig.stored == [1, 2, 3, 4]
        await asyncio.sleep(CONFIG.grace_s - 1)
        assert await rig.collector.maybe_round()
        assert rig.stored == [1, 2, 3, 4]
        await asyncio.sleep(2)
        assert await rig.collector.maybe_round()
        assert rig.stored == [2, 3, 4]
        assert rig.tombstones == []
        assert not await UnderReplicationRecords(rig.store, rig.clock).locked(LedgerId(1))


async def test_a_copy_that_is_named_again_or_under_repair_stays() -> None:
    async with open_rig(inline=True) as rig:
        await rig.begin(1, 2)
        for ledger in (1, 2):
            await rig.keep(ledger, THERE, closed=True)
        assert await rig.collector.maybe_round()
        await asyncio.sleep(CONFIG.grace_s + 1)
        repairing = UnderReplicationRecords(rig.elsewhere, rig.clock)
        await repairing.lock(LedgerId(1), "replicator")
        await rig.keep(2, HERE, closed=True)
        assert await rig.collector.maybe_round()
        assert rig.stored == [1, 2]
        await repairing.unlock(LedgerId(1), "replicator")
        assert await rig.collector.maybe_round()
        assert rig.stored == [2]


@pytest.mark.real_loop
async def test_tombstones_go_when_they_are_old() -> None:
    async with open_rig() as rig:
        await rig.begin(1, 2)
        await rig.drop(1)
        assert await rig.collector.maybe_round()
        rig.clock.advance_ms(900_000)
        await rig.drop(2)
        assert await rig.collector.maybe_round()
        assert rig.tombstones == [1, 2]
        rig.clock.advance_ms(200_000)
        assert await rig.collector.maybe_round()
        assert rig.tombstones == [2]
        assert rig.collector.counts.tombstones_deleted == 1


@pytest.mark.real_loop
async def test_tombstones_are_looked_through_a_page_at_a_time() -> None:
    async with open_rig(page=3) as rig:
        await rig.begin()
        for ledger in range(20):
            rig.clock.advance_ms(100_000)
            rig.bookie.service._admission.delete(ledger, for_good=True)
        assert await rig.collector.maybe_round()
        assert rig.tombstones == list(range(9, 20))
        assert rig.collector.counts.tombstones_deleted == 9


@pytest.mark.real_loop
async def test_a_former_store_is_removed_when_no_ledger_names_it() -> None:
    async with open_rig() as rig:
        await rig.begin(1)
        await rig.keep(8, FORMER, THERE, closed=True)
        await rig.collector.maybe_round()
        assert FORMER.incarnation in rig.formers
        assert not await rig.collector.drained(FORMER)
        await rig.keep(8, THERE, THERE, closed=True)
        await rig.collector.maybe_round()
        assert rig.formers == {}
        assert rig.collector.counts.formers_removed == 1


async def test_rounds_start_by_themselves_and_continue_after_an_error() -> None:
    async with open_rig(inline=True) as rig:
        await rig.begin(1, 2)
        await rig.drop(1)
        rig.store.away_at = paths.LEDGERS
        async with asyncio.TaskGroup() as group:
            running = group.create_task(rig.collector.run())
            await asyncio.sleep(25)
            assert rig.collector.counts.aborted == 2
            rig.store.away_at = ""
            await asyncio.sleep(12)
            assert rig.stored == [2]
            running.cancel()


# -- Space ---------------------------------------------------------------------------------------


@pytest.mark.real_loop
async def test_space_is_reclaimed_once_also_for_ledgers_that_an_earlier_run_deleted() -> None:
    async with open_rig() as rig:
        await rig.begin(*range(10))
        asked: list[tuple[int, int]] = []
        rig.bookie.storage.reclaim = lambda *span: asked.append(span)  # type: ignore[method-assign]
        rig.bookie.service._admission.delete(3, for_good=True)
        await rig.drop(3)
        await rig.collector.maybe_round()
        assert (asked, rig.reclaimer.dead) == ([], 1)  # a tenth is dead: too little for a reclaim
        await rig.drop(5)
        await rig.collector.maybe_round()
        assert asked == [(0, 9)]
        rig.collector.counts.rounds = 0  # as after a restart
        await rig.collector.maybe_round()
        assert asked == [(0, 9)]


@pytest.mark.real_loop
async def test_many_reclaimed_ledgers_are_marked_in_several_steps_of_the_loop() -> None:
    async with open_rig() as rig:
        await rig.begin(0, handed_out=10_000)
        for ledger in range(1, 1_001):
            rig.bookie.service._admission.delete(ledger, for_good=True)
        loop, write, step = asyncio.get_running_loop(), rig.bookie.commit.write, 0
        marked: Counter[int] = Counter()

        def tick() -> None:
            nonlocal step, ticking
            step += 1
            ticking = loop.call_soon(tick)

        def counting_write(puts: Sequence[Put]) -> None:
            marked[step] += len(puts)
            write(puts)

        ticking = loop.call_soon(tick)
        rig.bookie.commit.write = counting_write  # type: ignore[method-assign]
        assert await rig.collector.maybe_round()
        ticking.cancel()
        assert sum(marked.values()) == 1_000
        assert max(marked.values()) <= 200
        rig.collector.counts.rounds = 0  # as after a restart
        assert await rig.collector.maybe_round()
        assert sum(marked.values()) == 1_000, "they are marked already"


# -- Trouble -------------------------------------------------------------------------------------


async def test_a_copy_made_again_by_a_repair_after_the_lock_was_lost_stays() -> None:
    async with open_rig(inline=True) as rig:
        await rig.begin(1)
        await rig.keep(1, THERE, closed=True)
        assert await rig.collector.maybe_round()
        await asyncio.sleep(CONFIG.grace_s + 1)
        writer = await rig.bookie.connect()
        repairing = UnderReplicationRecords(rig.elsewhere, rig.clock)

        async def lose_the_lock(path: str) -> None:
            if path != paths.ledger(LedgerId(1)) or not await repairing.locked(LedgerId(1)):
                return
            rig.store.on_get = None
            rig.store.expire()
            rig.store.reconnect()
            assert await repairing.lock(LedgerId(1), "replicator")
            assert await writer.add(add(1, 0, flags=COPY)) == [BookieCode.OK]

        rig.store.on_get = lose_the_lock
        await rig.collector.maybe_round()
        await rig.keep(1, HERE, closed=True)  # the replicator holds its lock
        assert rig.stored == [1]


async def test_a_bookie_that_stood_still_does_not_trust_its_lock() -> None:
    """The bookie's session may have ended unnoticed, and a repair may have copied its entries
    elsewhere."""

    async with open_rig(inline=True) as rig:
        await rig.begin(1)
        await rig.keep(1, THERE, closed=True)
        assert await rig.collector.maybe_round()
        await asyncio.sleep(CONFIG.grace_s + 1)
        records = UnderReplicationRecords(rig.store, rig.clock)

        async def pause(path: str) -> None:
            if path == paths.ledger(LedgerId(1)):
                rig.store.on_get = None
                assert await records.locked(LedgerId(1))
                stand_still(5.0)

        rig.store.on_get = pause
        assert await rig.collector.maybe_round()
        assert rig.stored == [1]
        assert not await records.locked(LedgerId(1))
        assert await rig.collector.maybe_round()
        assert rig.stored == []


async def test_a_bookie_stops_during_a_deletion_although_the_metadata_is_away() -> None:
    async with open_rig(inline=True) as rig:
        await rig.begin(1)
        await rig.keep(1, THERE, closed=True)
        assert await rig.collector.maybe_round()
        await asyncio.sleep(CONFIG.grace_s + 1)
        looking = asyncio.Event()
        others = UnderReplicationRecords(rig.elsewhere, rig.clock)

        async def hang(path: str) -> None:
            if path == paths.ledger(LedgerId(1)) and await others.locked(LedgerId(1)):
                rig.store.on_get = None
                looking.set()
                await asyncio.get_running_loop().create_future()

        rig.store.on_get = hang
        async with asyncio.TaskGroup() as group:
            running = group.create_task(rig.collector.run())
            await looking.wait()
            rig.store.suspend()
            running.cancel()
            await asyncio.wait({running}, timeout=5.0)
            assert running.cancelled(), "the cancellation was forgotten"


@pytest.mark.real_loop
async def test_ledgers_deleted_before_an_aborted_round_are_noted_as_dead() -> None:
    async with open_rig() as rig:
        await rig.begin(1, 2, 3)
        assert await rig.collector.maybe_round()
        await rig.drop(2)
        # The collector reads this path after it deleted 2.
        rig.store.away_at = paths.ledger(LedgerId(3))
        assert not await rig.collector.maybe_round()
        assert rig.stored == [1, 3]
        asked: list[tuple[int, int]] = []
        rig.bookie.storage.reclaim = lambda *span: asked.append(span)  # type: ignore[method-assign]
        rig.store.away_at = ""
        assert await rig.collector.maybe_round()
        assert asked == [(1, 3)]


async def test_an_unreadable_record_of_one_ledger_does_not_stop_the_collection() -> None:
    async with open_rig(inline=True) as rig:
        await rig.begin(1, 2, 3)
        await rig.keep(3, THERE, closed=True)
        path = paths.ledger(LedgerId(1))
        stored = await rig.elsewhere.get(path)
        assert stored is not None
        await rig.elsewhere.put(path, b"\xff", expected=stored.version)
        assert await rig.collector.maybe_round()
        await rig.drop(2)
        await asyncio.sleep(CONFIG.grace_s + 1)
        assert await rig.collector.maybe_round()
        assert rig.stored == [1]
        assert FORMER.incarnation in rig.formers  # that ledger may name it


async def test_metadata_that_becomes_unreadable_between_two_looks_stops_nothing_else() -> None:
    async with open_rig(inline=True) as rig:
        await rig.begin(1, 2)
        for ledger in (1, 2):
            await rig.keep(ledger, THERE, closed=True)
        assert await rig.collector.maybe_round()
        await asyncio.sleep(CONFIG.grace_s + 1)
        path = paths.ledger(LedgerId(1))
        stored = await rig.elsewhere.get(path)
        assert stored is not None
        await rig.elsewhere.put(path, b"\xff", expected=stored.version)
        assert await rig.collector.maybe_round()
        assert rig.stored == [1]


@pytest.mark.real_loop
async def test_a_hidden_ledger_whose_metadata_cannot_be_read_stops_nothing_else() -> None:
    async with open_rig() as rig:
        await rig.begin(1, 2, 3)
        await rig.drop(3)
        path = paths.ledger(LedgerId(2))
        stored = await rig.elsewhere.get(path)
        assert stored is not None
        await rig.elsewhere.put(path, b"\xff", expected=stored.version)
        rig.store.hidden.add("2")
        assert await rig.collector.maybe_round()
        assert rig.stored == [1, 2]


@pytest.mark.real_loop
async def test_a_damaged_tombstone_does_not_end_the_bookie() -> None:
    async with open_rig() as rig:
        await rig.begin(1, 2)
        assert await rig.collector.maybe_round()
        await rig.drop(1)

        def reclaim(first: int, last: int) -> None:
            rig.bookie.storage.write([(tombstone_key(1), b"x")])

        rig.bookie.storage.reclaim = reclaim  # type: ignore[method-assign]
        assert await rig.collector.maybe_round()
