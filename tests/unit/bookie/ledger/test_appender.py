"""The appender's shell when several events arrive in one turn of the event loop."""

import asyncio

import pytest
from fakes.ledger_bookies import BookieCluster, bookie_cluster
from fakes.ledger_lives import QUICK, append, confirmed, create, ledger_cluster, seated, spare
from fakes.virtual_loop import stand_still
from support import wait_until

from magnetar.bookie.ledger.add_stream import LEDGERS_PER_TURN, AddStream
from magnetar.bookie.ledger.appender import SPARES_S, LedgerAppender
from magnetar.bookie.ledger.bookie_registry import BookieRegistry
from magnetar.bookie.ledger.ledgers import Ledgers
from magnetar.metadata import paths
from magnetar.metadata.codec import encode_bookie_drain
from magnetar.metadata.memory import Fault, MemoryStore
from magnetar.metadata.model import BookieRegistration
from magnetar.metadata.store import ABSENT
from magnetar.metadata.under_replication import BookieDrain
from magnetar.protos.envelope import Add, BookieCode


async def test_an_append_from_a_progress_callback_survives_a_failed_new_member() -> None:
    """An ensemble change confirms the entries that were acknowledged during the change. Meanwhile
    the stream of the new member is lost. The ledger did not listen to that stream yet."""

    async with bookie_cluster(4) as nodes:
        faults: list[Fault] = []
        store = MemoryStore(
            nodes.tree,
            faults=lambda op, path: (
                faults[0] if faults and op == "put" and "/ledgers/meta" in path else None
            ),
        )
        async with nodes.process(QUICK, store=store) as ledgers:
            appender = await create(ledgers)
            append(appender)
            await confirmed(appender)
            faults.append(Fault.REQUEST_LOST)
            newcomer = spare(nodes, appender)
            seated(nodes, appender)[0].kill()
            append(appender)
            await wait_until(lambda: "changing" in appender.describe())
            append(appender)
            told: list[int] = []

            def progress() -> None:
                told.append(appender.confirmed)
                if len(told) == 1:
                    append(appender)

            appender.progress = progress
            newcomer.kill()
            await wait_until(lambda: not ledgers.services.pool.adds(newcomer.member).keeps_up)
            faults.clear()
            await wait_until(lambda: told)
            await confirmed(appender)
            assert appender.confirmed == appender.appended == 3
            assert newcomer in seated(nodes, appender)


async def test_after_a_standstill_pending_acks_are_read_before_bookies_count_as_silent() -> None:
    """The bookies' acks have arrived, but the process has not read them yet. If the appender
    counted all bookies as silent, it would replace all of them or fail the ledger."""

    async with ledger_cluster(4) as (nodes, ledgers):
        appender = await create(ledgers)
        members = seated(nodes, appender)
        for pause_s in (1.2, 2.0, 60.0):  # QUICK gives bookies 0.3 s, and an ack quorum 1.5 s
            append(appender)
            await asyncio.sleep(0.25)  # the appender checks its timeouts some times
            append(appender)
            stand_still(pause_s)
            await confirmed(appender)
            assert seated(nodes, appender) == members
            assert not appender.degraded


async def test_a_process_with_repeated_standstills_still_detects_a_silent_bookie() -> None:
    async with ledger_cluster(4) as (nodes, ledgers):
        appender = await create(ledgers)
        silent = seated(nodes, appender)[0]
        silent.may_take.clear()
        append(appender)
        while not appender.degraded:
            assert asyncio.get_running_loop().time() < 20
            await asyncio.sleep(0.01)
            stand_still(2.0)
        silent.may_take.set()


async def test_a_bookie_that_refuses_all_entries_in_flight_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await create(ledgers)
        full = seated(nodes, appender)[0]
        full.judge_add = lambda _: BookieCode.READ_ONLY
        for _ in range(1_000):
            append(appender)
        await confirmed(appender)
        await wait_until(lambda: "failed seats [0]" in appender.describe())
        assert caplog.text.count("add refused") == 1
        assert "READ_ONLY" in appender.trouble


# -- members without a spare -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["draining", "unlisted"])
async def test_a_draining_or_unlisted_bookie_that_answers_again_keeps_its_seat(how: str) -> None:
    """No spare exists, and the silent bookie serves again."""

    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await create(ledgers)
        silent = seated(nodes, appender)[0]
        bookie = silent.member.bookie
        if how == "unlisted":
            await nodes.unregister(silent)
        else:
            drain = encode_bookie_drain(BookieDrain(bookie, 0, decommission=False))
            await nodes.store.put(paths.bookie_draining(bookie), drain, expected=ABSENT)
        await wait_until(lambda: not ledgers.services.directory.is_writable(silent.member))
        silent.may_take.clear()
        append(appender)
        await wait_until(lambda: "failed seats [0]" in appender.describe())
        silent.may_take.set()
        await wait_until(lambda: "failed seats []" in appender.describe())
        append(appender)
        await wait_until(lambda: silent.entries(appender.ledger) == [0, 1])
        # `degraded` stays true for a draining bookie: the owner rolls the ledger when a spare
        # exists.
        assert appender.degraded == (how == "draining")


# -- a ledger ends while one of its bookies is behind ----------------------------------------------


async def ended(ledgers: Ledgers, nodes: BookieCluster, count: int = 4) -> LedgerAppender:
    """A ledger that was closed before its first bookie took any of its entries."""
    appender = await create(ledgers)
    seated(nodes, appender)[0].may_take.clear()
    append(appender, count)
    await confirmed(appender)
    await appender.close()
    return appender


async def test_a_member_whose_late_acks_arrive_is_not_noted() -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await ended(ledgers, nodes)
        late = seated(nodes, appender)[0]
        late.may_take.set()
        await wait_until(lambda: len(late.entries(appender.ledger)) == 4)
        await asyncio.sleep(2 * QUICK.add_timeout_s)
        assert not len(ledgers.bad_copies)


@pytest.mark.parametrize("how", ["lost", "refused", "silent"])
async def test_a_member_whose_late_acks_never_arrive_is_noted_once(how: str) -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await ended(ledgers, nodes)
        late = seated(nodes, appender)[0]

        def judge(add: Add) -> BookieCode | None:
            return BookieCode.FENCED if add.entry >= 2 else None

        late.judge_add = judge
        match how:
            case "lost":
                late.kill()
            case "refused":
                late.may_take.set()
        await wait_until(lambda: len(ledgers.bad_copies))
        ((ledger, note),) = ledgers.bad_copies.drain()
        first = 2 if how == "refused" else 0
        assert (ledger, note.member) == (appender.ledger, late.member)
        assert (note.first_entry, note.last_entry) == (first, 3)
        late.may_take.set()
        await asyncio.sleep(2 * QUICK.add_timeout_s)
        assert not len(ledgers.bad_copies)  # the member is noted once


@pytest.mark.parametrize("how", ["READ_ONLY", "CONNECTION_LOST", "SILENT"])
async def test_the_appender_names_the_failed_bookies(how: str) -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        appender = await create(ledgers)
        assert appender.trouble == ""
        two = seated(nodes, appender)[:2]
        for bookie in two:
            match how:
                case "READ_ONLY":
                    bookie.judge_add = lambda _: BookieCode.READ_ONLY
                case "CONNECTION_LOST":
                    bookie.kill()
                case "SILENT":
                    bookie.may_take.clear()
        append(appender)
        expected = ", ".join(f"bookie {bookie.member.bookie}: {how}" for bookie in two)
        await wait_until(lambda: appender.trouble == expected)
        assert appender.confirmed == -1
        for bookie in two:
            bookie.judge_add = lambda _: None
            bookie.restart()
            bookie.may_take.set()
        await confirmed(appender)
        await wait_until(lambda: appender.trouble == "")


class CountingDirectory(BookieRegistry):
    """A directory that counts the look-ups of writable bookies."""

    looks = 0

    @property
    def writable(self) -> tuple[BookieRegistration, ...]:
        self.looks += 1
        return super().writable


async def test_an_idle_ledger_rarely_looks_up_bookies_and_takes_its_failed_member_back() -> None:
    async with ledger_cluster(3, directory_of=CountingDirectory) as (nodes, ledgers):
        appender = await create(ledgers)
        append(appender)
        await confirmed(appender)
        away = seated(nodes, appender)[0]
        await nodes.unregister(away)
        away.kill()
        await wait_until(lambda: appender.degraded)
        await wait_until(lambda: not appender._writer.kept)
        directory = ledgers.services.directory
        assert isinstance(directory, CountingDirectory)
        directory.looks = 0
        await asyncio.sleep(30 * SPARES_S)
        assert 28 <= directory.looks <= 31
        append(appender)  # two of three bookies confirm the entry
        await confirmed(appender)
        away.restart()
        await nodes.register(away)
        await wait_until(lambda: not appender.degraded, deadline_s=3 * SPARES_S)


# -- a ledger that learns of a lost stream after other ledgers -------------------------------------


class Earlier:
    """Other ledgers, attached to the streams of all bookies before the ledger of a test. The test
    sets `on_loss`: it is called before its ledger learns that a stream is lost."""

    def __init__(self, nodes: BookieCluster, ledgers: Ledgers) -> None:
        self.on_loss = lambda: None
        for bookie in nodes.bookies:
            for ledger in range(1_000, 1_000 + LEDGERS_PER_TURN):
                ledgers.services.pool.adds(bookie.member).attach(ledger, self)

    def on_acks(self, stream: AddStream, entries: list[int]) -> None:
        raise AssertionError(entries)

    def on_add_failed(self, stream: AddStream, entry: int, code: BookieCode) -> None:
        raise AssertionError((entry, code))

    def on_stream(self, stream: AddStream) -> None:
        if stream.put is None:
            on_loss, self.on_loss = self.on_loss, lambda: None
            on_loss()


async def test_an_append_before_the_ledger_learns_of_a_loss_reaches_the_new_member() -> None:
    async with ledger_cluster(4) as (nodes, ledgers):
        earlier = Earlier(nodes, ledgers)
        appender = await create(ledgers)
        append(appender)
        await confirmed(appender)
        lost = seated(nodes, appender)[0]
        earlier.on_loss = lambda: append(appender)
        lost.kill()
        await wait_until(lambda: lost not in seated(nodes, appender))
        await confirmed(appender)
        for bookie in seated(nodes, appender):
            await wait_until(lambda bookie=bookie: 1 in bookie.entries(appender.ledger))


async def test_a_ledger_that_ends_before_it_learns_of_a_loss_notes_the_missing_copies() -> None:
    async with ledger_cluster(3) as (nodes, ledgers):
        earlier = Earlier(nodes, ledgers)
        appender = await create(ledgers)
        lost = seated(nodes, appender)[0]
        await wait_until(lambda: ledgers.services.pool.adds(lost.member).keeps_up)
        lost.may_take.clear()
        append(appender, 3)
        await confirmed(appender)
        noted: list[int] = []

        def end() -> None:
            appender.abandon()
            noted.append(len(ledgers.bad_copies))

        earlier.on_loss = end
        lost.kill()
        await wait_until(lambda: noted)
        assert noted == [1]
        ((ledger, note),) = ledgers.bad_copies.drain()
        assert (ledger, note.member) == (appender.ledger, lost.member)
        assert (note.first_entry, note.last_entry) == (0, 2)
