from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from fakes.bookies import (
    INCARNATION,
    KEY,
    OTHER,
    GatedThread,
    Writer,
    add,
    last_request,
    none,
    read_request,
    running_bookie,
    some,
)
from support import settle, wait_until

from magnetar.bookie.contract import LastConfirmed
from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.service import READ_FRAME_BYTES, READS_WAITING_MAX
from magnetar.bookie.storage.format import decode_ledger_record, entry_key
from magnetar.protos.envelope import (
    RECOVERY,
    BookieCode,
)

if TYPE_CHECKING:
    from magnetar.bookie.contract import ReadRequest

pytestmark = pytest.mark.real_loop

OK = BookieCode.OK


# -- Reads -------------------------------------------------------------------------------------


async def test_a_read_returns_the_stored_run_and_names_the_gap() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        await writer.add(*(add(1, entry) for entry in (0, 1, 2, 4)))
        gap = none(3, BookieCode.NO_SUCH_ENTRY)
        assert await bookie.read(read_request(0, 9)) == [*some(0, 1, 2), gap]
        assert await bookie.read(read_request(0, 2)) == some(0, 1, 2)
        assert await bookie.read(read_request(3, 9)) == [gap]
        assert await bookie.read(read_request(4, 4)) == some(4)
        assert await bookie.read(read_request(0, 9, entries_max=2)) == some(0, 1)
        assert await bookie.read(read_request(0, 9, entries_max=3)) == some(0, 1, 2)
        assert await bookie.read(read_request(0, 9, bytes_max=1)) == some(0)
        assert await bookie.read(read_request(0, 9, bytes_max=44)) == some(0, 1)


async def test_a_long_read_comes_in_several_frames() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        payload = bytes(50_000)
        await writer.add(*(add(1, entry, payload) for entry in range(40)))
        sizes = [sum(map(len, parts)) async for parts in bookie.service.read(read_request(0, 39))]
        assert len(sizes) == 4
        assert all(size < READ_FRAME_BYTES + 51_000 for size in sizes)


async def test_an_entry_that_is_not_synced_yet_can_be_read() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        bookie.sync_thread.open = False
        await writer.send(add(1, 0))
        await wait_until(lambda: bookie.sync_thread.held)
        assert await bookie.read(read_request(0, 0)) == some(0)


async def test_a_read_answers_no_such_ledger_then_after_a_fence_no_such_entry() -> None:
    async with running_bookie() as bookie:
        assert await bookie.read(read_request(5, 9)) == [none(5, BookieCode.NO_SUCH_LEDGER)]
        last = await bookie.service.last_confirmed(last_request())
        assert last.code is BookieCode.NO_SUCH_LEDGER
        last = await bookie.service.last_confirmed(last_request(fence=True))
        assert last.code is BookieCode.NO_SUCH_ENTRY
        assert await bookie.read(read_request(5, 9)) == [none(5, BookieCode.NO_SUCH_ENTRY)]


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (read_request(0, 9, incarnation=OTHER), BookieCode.WRONG_INCARNATION),
        (read_request(0, 9, incarnation=""), BookieCode.WRONG_INCARNATION),
        (read_request(0, 9, incarnation=OTHER, fence=True), BookieCode.WRONG_INCARNATION),
        (read_request(0, 9, master_key=KEY + 1), BookieCode.UNAUTHORIZED),
        (read_request(0, 9, master_key=KEY + 1, fence=True), BookieCode.UNAUTHORIZED),
        (read_request(9, 8), BookieCode.BAD_REQUEST),
        (read_request(-1, 8), BookieCode.BAD_REQUEST),
        (read_request(0, 9, ledger=-1), BookieCode.BAD_REQUEST),
        (read_request(0, 9, ledger=-1, fence=True), BookieCode.BAD_REQUEST),
    ],
)
async def test_a_refused_read_gives_the_reason_and_fences_nothing(
    request_: ReadRequest, code: BookieCode
) -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        await writer.add(add(1, 0))
        (answer,) = await bookie.read(request_)
        assert answer.code is code
        assert await writer.add(add(1, 1)) == [OK]


async def test_an_unreadable_entry_is_unknown_and_never_missing() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        await writer.add(add(1, 0))
        bookie.storage.failing["read"] = StorageFailed("read", "Corruption: checksum mismatch")
        assert await bookie.read(read_request(0, 9)) == [none(0, BookieCode.IO_ERROR)]
        assert await bookie.read(read_request(0, 9, ledger=2)) == [none(0, BookieCode.IO_ERROR)]
        assert await bookie.read(read_request(0, 9, ledger=2, fence=True)) == [
            none(0, BookieCode.IO_ERROR)
        ]
        for ledger in (1, 2):
            last = await bookie.service.last_confirmed(last_request(ledger))
            assert last.code is BookieCode.IO_ERROR
        page = await bookie.service.list_entries(INCARNATION, ledger=2, first=0, entries_max=0)
        assert page.code is BookieCode.IO_ERROR


async def test_too_many_reads_are_turned_away_as_unknown() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        await writer.add(add(1, 0))
        bookie.service._read_thread = bookie.sync_thread
        bookie.sync_thread.open = False
        async with asyncio.TaskGroup() as group:
            reads = [
                group.create_task(bookie.read(read_request(0, 0)))
                for _ in range(READS_WAITING_MAX + 1)
            ]
            await wait_until(lambda: bookie.sync_thread.held == READS_WAITING_MAX)
            await settle()
            bookie.sync_thread.release()
        answers = [read.result() for read in reads]
        assert answers.count(some(0)) == READS_WAITING_MAX
        assert answers.count([none(0, BookieCode.OVERLOADED)]) == 1


async def test_last_confirmed_returns_the_last_entry_with_its_confirmed_and_length() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        await writer.add(add(1, 0), add(1, 4, confirmed=2), add(1, 3, confirmed=1))
        last = await bookie.service.last_confirmed(last_request())
        assert (last.code, last.last_entry, last.confirmed) == (OK, 4, 2)
        assert last.length == 5 * len(b"payload")


async def test_a_last_entry_of_another_ledger_is_answered_as_unknown() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        await writer.add(add(1, 4, confirmed=2), add(2, 9, confirmed=8))
        stranger = bookie.storage.entry(2, 9)
        assert stranger is not None
        bookie.storage.write([(entry_key(1, 4), stranger)])
        last = await bookie.service.last_confirmed(last_request())
        assert last.code is BookieCode.IO_ERROR


async def test_a_ledger_whose_last_entry_cannot_be_read_is_fenced_all_the_same() -> None:
    """Otherwise a damaged entry at the end of a ledger would prevent its recovery, although the
    other bookies have that entry."""

    async with running_bookie() as bookie:
        writer = await bookie.connect()
        await writer.add(add(1, 4, confirmed=2), add(2, 9))
        stranger = bookie.storage.entry(2, 9)
        assert stranger is not None
        bookie.storage.write([(entry_key(1, 4), stranger)])
        last = await bookie.service.last_confirmed(last_request(fence=True))
        assert last == LastConfirmed(code=OK)  # the bookie knows no confirmed entry
        assert bookie.service.counts.fences == 1
        assert await writer.add(add(1, 5)) == [BookieCode.FENCED]


# -- Fences ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [True, False])
async def test_no_answer_to_a_fence_before_it_is_durable(*, stored: bool) -> None:
    async with running_bookie() as bookie:
        if stored:
            writer = await bookie.connect()
            await writer.add(add(1, 0))
        bookie.sync_thread.open = False
        async with asyncio.TaskGroup() as group:
            read = group.create_task(bookie.read(read_request(0, 0, fence=True)))
            last = group.create_task(bookie.service.last_confirmed(last_request(fence=True)))
            await wait_until(lambda: bookie.sync_thread.held)
            await settle()
            assert not read.done()
            assert not last.done()
            bookie.sync_thread.release()
            bookie.sync_thread.open = True
        assert read.result() == (some(0) if stored else [none(0, BookieCode.NO_SUCH_ENTRY)])
        restarted = bookie.storage.crash()
        async with running_bookie(storage=restarted) as again:
            assert await (await again.connect()).add(add(1, 1)) == [BookieCode.FENCED]


async def test_a_second_fence_after_a_durable_fence_costs_no_sync() -> None:
    async with running_bookie() as bookie:
        await bookie.read(read_request(0, 0, fence=True))
        syncs = bookie.storage.syncs
        await bookie.read(read_request(0, 0, fence=True))
        assert bookie.storage.syncs == syncs


async def test_a_second_fence_while_the_first_is_not_durable_waits_too() -> None:
    async with running_bookie() as bookie:
        bookie.sync_thread.open = False
        async with asyncio.TaskGroup() as group:
            first = group.create_task(bookie.read(read_request(0, 0, fence=True)))
            await wait_until(lambda: bookie.sync_thread.held)
            second = group.create_task(bookie.read(read_request(0, 0, fence=True)))
            await settle()
            bookie.sync_thread.release()
            await first
            await settle()
            assert not second.done()  # the second request came after that sync had begun
            bookie.sync_thread.open = True
            await wait_until(lambda: bookie.sync_thread.held)
            bookie.sync_thread.release()
        assert bookie.service.counts.fences == 1


@pytest.mark.parametrize("stride", [0, 3])
@pytest.mark.parametrize(("for_good", "code"), [(False, "NO_SUCH_ENTRY"), (True, "DELETED")])
async def test_a_fence_that_was_removed_with_its_copy_is_made_again_before_the_answer(
    for_good: bool, code: str, stride: int
) -> None:
    """A left-over copy is removed between the fence and the answer. The bookie fences again,
    durably."""

    async with running_bookie() as bookie:
        writer = await bookie.connect()
        await writer.add(add(1, 0))
        reads = bookie.service._read_thread = GatedThread()
        reads.open = False
        asked = replace(read_request(0, 0, fence=True), run=stride and 1, stride=stride)
        async with asyncio.TaskGroup() as group:
            read = group.create_task(bookie.read(asked))
            last = group.create_task(bookie.service.last_confirmed(last_request(fence=True)))
            await wait_until(lambda: reads.held == 2)
            bookie.service._admission.delete(1, for_good=for_good)
            bookie.sync_thread.open = False
            reads.release()
            if not for_good:
                await wait_until(lambda: bookie.sync_thread.held)
                await settle()
                assert not read.done()
                assert not last.done()
            bookie.sync_thread.release()
            bookie.sync_thread.open = True
        assert read.result() == [none(0, BookieCode[code])]
        assert last.result().code is BookieCode[code]
        record = bookie.storage.ledger_record(1)
        if for_good:
            assert record is None
        else:
            assert record is not None
            assert decode_ledger_record(record).fenced
            assert bookie.storage.unsynced == 0
        reads.shutdown()


async def test_a_fencing_read_returns_an_add_that_was_admitted_before_the_fence() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        bookie.sync_thread.open = False
        await writer.send(add(1, 0))
        await wait_until(lambda: bookie.sync_thread.held)
        async with asyncio.TaskGroup() as group:
            read = group.create_task(bookie.read(read_request(0, 1, fence=True)))
            await settle()
            await writer.send(add(1, 1))  # an add after the fence
            assert await writer.acks(1) == [(1, 1, BookieCode.FENCED)]
            bookie.sync_thread.open = True
            bookie.sync_thread.release()
        assert read.result() == [*some(0), none(1, BookieCode.NO_SUCH_ENTRY)]
        assert await writer.acks(1) == [(1, 0, OK)]
        assert await writer.add(add(1, 1, flags=RECOVERY)) == [OK]


async def test_no_interleaving_acknowledges_an_add_that_a_fence_read_did_not_see() -> None:
    """Oracle: after the answer to a fencing read, the bookie acknowledges no add of an entry that
    the read did not return."""

    async with running_bookie() as bookie:
        writers = [await bookie.connect() for _ in range(3)]

        async def write(writer: Writer, ledger: int, number: int) -> None:
            for step in range(4):
                await settle(number)
                await writer.send(add(ledger, 4 * number + step))

        async def fence(ledger: int, turns: int) -> set[int]:
            await settle(turns)
            seen: set[int] = set()
            for entry in range(12):
                answers = await bookie.read(read_request(entry, entry, ledger=ledger, fence=True))
                seen |= {answer.entry for answer in answers if answer.code is OK}
            return seen

        outcomes = set()
        for ledger in range(40):
            async with asyncio.TaskGroup() as group:
                for number, writer in enumerate(writers):
                    group.create_task(write(writer, ledger, number))
                fencing = group.create_task(fence(ledger, ledger // 2))
            acks = [ack for writer in writers for ack in await writer.acks(4)]
            acked = {entry for _, entry, code in acks if code is OK}
            assert acked <= fencing.result(), ledger
            outcomes.add(len(acked))
        assert len(outcomes) > 3  # fences arrived before, between and after the adds


async def test_wrong_key_fences_nothing() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        await writer.add(add(1, 0))
        last = await bookie.service.last_confirmed(last_request(master_key=1, fence=True))
        assert last.code is BookieCode.UNAUTHORIZED
        assert await writer.add(add(1, 1)) == [OK]
