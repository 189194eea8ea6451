"""LedgerReader over fake bookies: the replicas that the reader asks, the bad copies that the reader
notes, and striped ledgers."""

import asyncio
from dataclasses import replace
from random import Random

import pytest
from fakes.ledger_bookies import BookieCluster, FakeBookie, bookie_cluster
from fakes.ledger_lives import QUICK, append, confirmed, create, ledger_cluster, payload, seated
from support import settle, wait_until

from magnetar.bookie.ledger.appender import LedgerAppender
from magnetar.bookie.ledger.bad_copies import BadCopies
from magnetar.bookie.ledger.config import LedgerConfig
from magnetar.bookie.ledger.errors import EntryUnreadable
from magnetar.bookie.ledger.ledgers import Ledgers
from magnetar.metadata.memory import MemoryStore
from magnetar.metadata.model import Member
from magnetar.protos.envelope import BookieCode
from magnetar.runtime.errors import StreamClosed

# Long timeouts: on a busy machine, no bookie counts as silent unless a test makes it silent.
PATIENT = replace(QUICK, read_timeout_s=10.0, speculative_read_s=10.0, add_timeout_s=10.0)


async def written(ledgers: Ledgers, nodes: BookieCluster, count: int) -> LedgerAppender:
    """Write and close a ledger. Every member has all entries of its write sets."""
    appender = await create(ledgers)
    append(appender, count)
    await confirmed(appender)
    quorum = ledgers.services.config.quorum
    seats = seated(nodes, appender)
    copies = count * quorum.write_quorum
    await wait_until(lambda: sum(len(b.entries(appender.ledger)) for b in seats) == copies)
    await appender.close()
    return appender


def noted(copies: BadCopies) -> list[tuple[Member, int, int]]:
    return [(note.member, note.first_entry, note.last_entry) for _, note in copies.drain()]


async def read_until_noted(ledgers: Ledgers, appender: LedgerAppender, entry: int) -> None:
    """Read until a bad copy is noted. The reader chooses its first replica at random."""
    for _ in range(50):
        reader = ledgers.reader(appender.metadata)
        assert len(await reader.read(entry, entry, bytes_max=1)) == 1
        if len(ledgers.bad_copies):
            return
    raise AssertionError("the bad copy was never asked for")


# -- bad copies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        BookieCode.CORRUPT,
        BookieCode.IO_ERROR,
        BookieCode.NO_SUCH_ENTRY,
        BookieCode.NO_SUCH_LEDGER,
    ],
)
async def test_t36_a_bad_copy_is_passed_over_and_noted(code: BookieCode) -> None:
    async with ledger_cluster(3, PATIENT) as (nodes, ledgers):
        appender = await written(ledgers, nodes, 4)
        bad = nodes.bookies[1]
        bad.judge_read = lambda _, entry: code if entry == 2 else None
        await read_until_noted(ledgers, appender, 2)
        assert noted(ledgers.bad_copies) == [(bad.member, 2, 2)]


async def test_a_bad_copy_in_the_midst_of_a_range_is_noted_at_once() -> None:
    async with ledger_cluster(1, LedgerConfig(ensemble_size=1, write_quorum=1, ack_quorum=1)) as (
        nodes,
        ledgers,
    ):
        appender = await written(ledgers, nodes, 5)
        stored = nodes.bookies[0].ledgers[appender.ledger].entries
        stored[3] = stored[3][:-1] + b"?"
        found = await ledgers.reader(appender.metadata).read(0, 4, bytes_max=1 << 20)
        assert len(found) == 3
        assert noted(ledgers.bad_copies) == [(nodes.bookies[0].member, 3, 3)]


async def test_an_interrupted_answer_returns_its_first_entries() -> None:
    async with ledger_cluster(3, PATIENT) as (nodes, ledgers):
        appender = await written(ledgers, nodes, 5)

        def lose(_: int, entry: int) -> BookieCode | None:
            if entry == 3:
                raise StreamClosed("lost", clean=False)
            return None

        for bookie in nodes.bookies:
            bookie.judge_read = lose
        reader = ledgers.reader(appender.metadata)
        found = await reader.read(0, 4, bytes_max=1 << 20)
        assert [entry.entry for entry in found] == [0, 1, 2]
        with pytest.raises(EntryUnreadable):
            await reader.read(3, 4, bytes_max=1 << 20)
        assert noted(ledgers.bad_copies) == []


@pytest.mark.parametrize(
    "code", [BookieCode.DAMAGED_STORE, BookieCode.OVERLOADED, BookieCode.WRONG_INCARNATION]
)
async def test_a_bookie_that_cannot_tell_has_no_bad_copy(code: BookieCode) -> None:
    async with ledger_cluster(3, PATIENT) as (nodes, ledgers):
        appender = await written(ledgers, nodes, 1)
        asked: list[int] = []
        nodes.bookies[1].judge_read = lambda _, entry: asked.append(entry) or code
        for _ in range(20):
            await ledgers.reader(appender.metadata).read(0, 0, bytes_max=1)
        assert asked
        assert noted(ledgers.bad_copies) == []


async def test_an_absent_entry_of_the_open_segment_is_not_noted() -> None:
    """The other members confirmed the entry while this member was away."""

    async with ledger_cluster(3, PATIENT) as (nodes, ledgers):
        appender = await create(ledgers)
        away = nodes.bookies[0]
        away.may_take.clear()
        append(appender, 2)
        await confirmed(appender)
        for _ in range(20):
            assert len(await appender.read(0, 1, bytes_max=1 << 20)) == 2
        assert away.reads
        assert noted(ledgers.bad_copies) == []
        away.may_take.set()


# -- what it says in the end ---------------------------------------------------------------------


async def test_a_ledger_deleted_during_a_read_is_not_reported_lost() -> None:
    async with ledger_cluster(3, PATIENT) as (nodes, ledgers):
        appender = await written(ledgers, nodes, 2)
        reader = ledgers.reader(appender.metadata)
        await ledgers.delete(appender.ledger)
        # The bookies still have the entries.
        assert len(await reader.read(0, 1, bytes_max=100)) == 2
        for bookie in nodes.bookies:
            del bookie.ledgers[appender.ledger]
        with pytest.raises(EntryUnreadable, match="deleted") as caught:
            await reader.read(0, 1, bytes_max=100)
        assert caught.value.deleted
        assert not caught.value.missing


async def test_no_entry_is_reported_missing_while_metadata_is_unavailable() -> None:
    """The metadata may have named other replicas."""

    async with bookie_cluster(3) as nodes:
        store = MemoryStore(nodes.tree)
        config = replace(PATIENT, metadata_timeout_s=0.1)
        async with nodes.process(config, store=store) as ledgers:
            appender = await written(ledgers, nodes, 1)
            for bookie in nodes.bookies:
                del bookie.ledgers[appender.ledger].entries[0]
            store.suspend()
            with pytest.raises(EntryUnreadable) as caught:
                await ledgers.reader(appender.metadata).read(0, 0, bytes_max=1)
            assert not caught.value.missing
            assert not caught.value.deleted
            store.reconnect()


# -- whom it asks --------------------------------------------------------------------------------


async def first_asked(ledgers: Ledgers, nodes: BookieCluster, appender: LedgerAppender) -> set[str]:
    """Return the replicas that new readers ask first."""
    names = set()
    for _ in range(20):
        for bookie in nodes.bookies:
            bookie.reads.clear()
        await ledgers.reader(appender.metadata).read(0, 0, bytes_max=1)
        names |= {bookie.member.bookie for bookie in nodes.bookies if bookie.reads}
    return names


async def test_healthy_replicas_are_asked_before_failing_read_only_and_unlisted_ones() -> None:
    async with ledger_cluster(3, PATIENT) as (nodes, ledgers):
        appender = await written(ledgers, nodes, 1)
        b0, b1, b2 = nodes.bookies
        assert await first_asked(ledgers, nodes, appender) == {"b0", "b1", "b2"}
        await nodes.unregister(b0)
        await wait_until(lambda: len(ledgers.services.directory.listed) == 2)
        assert await first_asked(ledgers, nodes, appender) == {"b1", "b2"}
        await nodes.register(b1, read_only=True)
        await wait_until(lambda: not ledgers.services.directory.is_writable(b1.member))
        assert await first_asked(ledgers, nodes, appender) == {"b2"}
        now = asyncio.get_running_loop().time()
        ledgers.services.health.on_error(b2.member, now)
        assert await first_asked(ledgers, nodes, appender) == {"b2"}
        b2.kill()
        await settle()
        assert await first_asked(ledgers, nodes, appender) == {"b1"}
        b1.kill()
        await settle()
        assert await first_asked(ledgers, nodes, appender) == {"b0"}


async def test_healthy_replicas_of_the_own_zone_are_asked_first() -> None:
    async with (
        bookie_cluster(3, zones="abc") as nodes,
        nodes.process(replace(PATIENT, zone="b")) as ledgers,
    ):
        appender = await written(ledgers, nodes, 1)
        assert await first_asked(ledgers, nodes, appender) == {"b1"}
        ledgers.services.health.on_error(nodes.bookies[1].member, asyncio.get_running_loop().time())
        assert await first_asked(ledgers, nodes, appender) == {"b0", "b2"}


async def test_a_silent_replica_is_asked_last_by_the_next_read() -> None:
    async with ledger_cluster(3, replace(PATIENT, speculative_read_s=0.3)) as (nodes, ledgers):
        appender = await written(ledgers, nodes, 1)
        nodes.bookies[2].may_read.clear()
        await first_asked(ledgers, nodes, appender)
        assert await first_asked(ledgers, nodes, appender) == {"b0", "b1"}
        nodes.bookies[2].may_read.set()


# -- striped ledgers -----------------------------------------------------------------------------

STRIPED = [(3, 2, 2), (4, 3, 2), (5, 3, 2), (4, 2, 1)]


def striped(sizes: tuple[int, int, int]) -> LedgerConfig:
    return replace(PATIENT, ensemble_size=sizes[0], write_quorum=sizes[1], ack_quorum=sizes[2])


def requests(nodes: BookieCluster) -> int:
    return sum(len(bookie.reads) for bookie in nodes.bookies)


@pytest.mark.parametrize("sizes", STRIPED)
async def test_a_striped_range_takes_one_request_for_each_stripe(
    sizes: tuple[int, int, int],
) -> None:
    async with ledger_cluster(sizes[0] + 1, striped(sizes)) as (nodes, ledgers):
        appender = await written(ledgers, nodes, 60)
        found = await ledgers.reader(appender.metadata).read(0, 59, bytes_max=1 << 20)
        assert [bytes(entry.payload) for entry in found] == [payload(n) for n in range(60)]
        assert requests(nodes) == -(-sizes[0] // sizes[1])


@pytest.mark.parametrize("sizes", STRIPED)
async def test_without_one_bookie_for_each_stripe_each_write_set_takes_a_request(
    sizes: tuple[int, int, int],
) -> None:
    async with ledger_cluster(sizes[0], striped(sizes)) as (nodes, ledgers):
        appender = await written(ledgers, nodes, 60)
        for bookie in nodes.bookies:
            await nodes.register(bookie, read_only=True)
        await wait_until(lambda: not ledgers.services.directory.writable)
        found = await ledgers.reader(appender.metadata).read(0, 59, bytes_max=1 << 20)
        assert [bytes(entry.payload) for entry in found] == [payload(n) for n in range(60)]
        assert requests(nodes) == -(-60 // sizes[1])


async def test_a_silent_bookie_delays_its_stripe_for_a_limited_time() -> None:
    async with ledger_cluster(5, replace(striped((5, 3, 2)), speculative_read_s=0.3)) as (
        nodes,
        ledgers,
    ):
        appender = await written(ledgers, nodes, 60)
        reader = ledgers.reader(appender.metadata)
        await reader.read(0, 59, bytes_max=1 << 20)
        silent = next(bookie for bookie in nodes.bookies if bookie.reads)
        silent.may_read.clear()
        for _ in range(3):
            found = await reader.read(0, 59, bytes_max=1 << 20)
            assert [bytes(entry.payload) for entry in found] == [payload(n) for n in range(60)]
        silent.may_read.set()


async def test_reading_ahead_in_stripes_is_bounded() -> None:
    async with ledger_cluster(5, striped((5, 3, 2))) as (nodes, ledgers):
        appender = await written(ledgers, nodes, 600)
        read: list[int] = []
        for bookie in nodes.bookies:
            bookie.judge_read = lambda _, entry: read.append(entry)
        reader = ledgers.reader(appender.metadata)
        found = await reader.read(0, 599, bytes_max=200)
        assert 10 <= len(found) <= 40
        assert len(read) <= 60, "many more entries were read than asked for"


@pytest.mark.parametrize("sizes", STRIPED)
@pytest.mark.parametrize("seed", range(3))
async def test_a_striped_read_is_complete_despite_dead_and_damaged_replicas(
    sizes: tuple[int, int, int], seed: int
) -> None:
    """Entries have very different sizes. The ledger has several segments, a dead bookie and damaged
    copies."""

    random = Random(seed)
    async with ledger_cluster(sizes[0] + 2, striped(sizes)) as (nodes, ledgers):
        appender = await create(ledgers)
        data = [random.randbytes(random.choice([0, 3, 50, 4000])) for _ in range(120)]
        for number, each in enumerate(data):
            appender.append_nowait([[each]])
            if number in (40, 80):
                await confirmed(appender)
                victim = random.choice(seated(nodes, appender))
                victim.kill()
                await settle()
                victim.restart()
        await confirmed(appender)
        await appender.close()
        await settle(100)
        if sizes[2] > 1:
            random.choice(nodes.bookies).kill()
        reader, found = ledgers.reader(appender.metadata), list[bytes]()
        while len(found) < len(data):
            last = min(len(found) + random.randrange(100), len(data) - 1)
            part = await reader.read(len(found), last, bytes_max=random.choice([1, 900, 9000]))
            assert [e.entry for e in part] == list(range(len(found), len(found) + len(part)))
            found += [bytes(entry.payload) for entry in part]
        assert found == data


@pytest.mark.parametrize("entry", range(20, 30))
async def test_a_bad_copy_in_the_midst_of_a_stripe_is_noted_at_once(entry: int) -> None:
    async with ledger_cluster(5, striped((5, 3, 2))) as (nodes, ledgers):
        appender = await written(ledgers, nodes, 60)
        asked: dict[int, FakeBookie] = {}

        def watch(bookie: FakeBookie) -> None:
            def judge(_: int, number: int) -> BookieCode | None:
                asked.setdefault(number, bookie)
                bad = number == entry and asked[number] is bookie
                return BookieCode.IO_ERROR if bad else None

            bookie.judge_read = judge

        for bookie in nodes.bookies:
            watch(bookie)
        found = await ledgers.reader(appender.metadata).read(0, 59, bytes_max=1 << 20)
        assert len(found) == 60
        assert noted(ledgers.bad_copies) == [(asked[entry].member, entry, entry)]


async def test_a_striped_read_returns_the_entries_before_an_unreadable_entry() -> None:
    async with ledger_cluster(3, striped((3, 2, 2))) as (nodes, ledgers):
        appender = await written(ledgers, nodes, 20)
        for bookie in nodes.bookies:
            bookie.judge_read = lambda _, entry: BookieCode.IO_ERROR if entry == 11 else None
        reader = ledgers.reader(appender.metadata)
        found = await reader.read(0, 19, bytes_max=1 << 20)
        assert [entry.entry for entry in found] == list(range(11))
        with pytest.raises(EntryUnreadable) as caught:
            await reader.read(11, 19, bytes_max=1 << 20)
        assert caught.value.entry == 11
        assert len(await reader.read(12, 19, bytes_max=1 << 20)) == 8
        assert {member for member, _, _ in noted(ledgers.bad_copies)} == {
            member for member in (b.member for b in nodes.bookies) if holds(member, appender)
        }


def holds(member: Member, appender: LedgerAppender) -> bool:
    """True if the member should have entry 11 of a ledger striped 3/2/2."""
    return appender.metadata.last_segment.members.index(member) in (2, 0)
