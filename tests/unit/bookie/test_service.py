from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING

import pytest
from fakes.bookies import (
    IDENTITY,
    INCARNATION,
    OTHER,
    FaultyStorage,
    add,
    envelope,
    last_request,
    none,
    read_request,
    running_bookie,
    some,
)
from support import settle, wait_until

from magnetar.bookie.contract import EntryRun
from magnetar.bookie.errors import StorageFailed
from magnetar.bookie.service import STREAMS_MAX, State
from magnetar.protos.envelope import (
    ENTRY_BYTES_MAX,
    BookieCode,
    encode_hello,
)
from magnetar.runtime.errors import StreamClosed

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.real_loop

OK = BookieCode.OK


# -- Write streams -----------------------------------------------------------------------------


async def test_an_add_is_acknowledged_when_it_is_durable_and_not_before() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        bookie.sync_thread.open = False
        await writer.send(add(1, 0), add(1, 1))
        await wait_until(lambda: bookie.sync_thread.held)
        async with asyncio.TaskGroup() as group:
            acks = group.create_task(writer.acks(2))
            await settle()
            assert not acks.done()
            bookie.sync_thread.release()
        assert acks.result() == [(1, 0, OK), (1, 1, OK)]


async def test_acks_of_one_group_come_in_one_frame() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        bookie.sync_thread.open = False
        await writer.send(add(1, 0))
        await wait_until(lambda: bookie.sync_thread.held)
        for entry in range(1, 50):
            await writer.send(add(1, entry))
        await settle()
        bookie.sync_thread.release()
        assert len(await writer.acks(1)) == 1
        await wait_until(lambda: bookie.sync_thread.held)
        bookie.sync_thread.release()
        assert len(await writer.acks(1)) == 49


async def test_a_refusal_does_not_wait_for_a_sync() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        await bookie.service.last_confirmed(last_request(fence=True))
        bookie.sync_thread.open = False
        assert await writer.add(add(1, 0)) == [BookieCode.FENCED]


async def test_the_hello_reply_names_the_member() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        assert writer.reply == (OK, INCARNATION, IDENTITY.boot_epoch)


async def test_another_incarnation_is_refused_as_unknown() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect(incarnation=OTHER)
        assert writer.reply is not None
        assert writer.reply.code is BookieCode.WRONG_INCARNATION
        assert not writer.reply.code.definite
        with pytest.raises(StreamClosed):
            await writer.stream.receive()


async def test_streams_above_the_limit_are_refused_as_unknown() -> None:
    async with running_bookie() as bookie:
        first = await bookie.connect()
        for _ in range(STREAMS_MAX - 1):
            await bookie.connect()
        late = await bookie.connect()
        assert late.reply is not None
        assert late.reply.code is BookieCode.OVERLOADED
        await first.stream.close()
        await wait_until(lambda: len(bookie.service._streams) < STREAMS_MAX)
        assert await (await bookie.connect()).add(add(1, 0)) == [OK]


@pytest.mark.parametrize("hello", [b"x", b"\x02" + encode_hello(INCARNATION, "n")[1:], add(1, 0)])
async def test_a_first_frame_that_is_no_hello_is_refused(hello: bytes) -> None:
    async with running_bookie() as bookie:
        writer = bookie.raw_stream()
        await writer.stream.send([hello])
        reply = await writer.stream.receive()
        assert reply[1] == BookieCode.BAD_REQUEST
        with pytest.raises(StreamClosed):
            await writer.stream.receive()
        assert bookie.storage.sequence() == 0


def corrupt(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (corrupt(add(1, 1), -1), BookieCode.CORRUPT),
        (corrupt(add(1, 1), 13), BookieCode.CORRUPT),  # the checksum itself
        (add(1, 1, flags=4), BookieCode.BAD_REQUEST),
        (add(1, 1, confirmed=1), BookieCode.BAD_REQUEST),
        (add(1, 1, confirmed=-2), BookieCode.BAD_REQUEST),
        (add(1, 1, bytes(ENTRY_BYTES_MAX + 1)), BookieCode.TOO_LARGE),
    ],
)
async def test_only_the_bad_add_is_refused_and_the_stream_continues(
    bad: bytes, code: BookieCode
) -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        assert await writer.add(add(1, 0), bad, add(1, 2)) == [OK, code, OK]
        assert await writer.add(add(1, 3)) == [OK]
        assert await bookie.read(read_request(0, 3)) == [
            *some(0),
            none(1, BookieCode.NO_SUCH_ENTRY),
        ]


async def test_the_largest_entry_is_stored_and_read() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        assert await writer.add(add(1, 0, bytes(ENTRY_BYTES_MAX))) == [OK]
        ((entry, code, stored),) = await bookie.read(read_request(0, 0, bytes_max=1))
        assert (entry, code) == (0, OK)
        assert stored == envelope(1, 0, bytes(ENTRY_BYTES_MAX))


def oversize(data: bytes) -> bytes:
    """An add whose envelope size points past the end of its frame."""
    changed = bytearray(data)
    struct.pack_into(">I", changed, 1, len(data))
    return bytes(changed)


@pytest.mark.parametrize(
    "damage", [lambda a: a[:-1], lambda a: a[:20], oversize, lambda a: a[:1] + bytes(4) + a[5:]]
)
async def test_a_damaged_frame_ends_its_stream_without_effect_and_no_other(
    damage: Callable[[bytes], bytes],
) -> None:
    async with running_bookie() as bookie:
        victim, other = await bookie.connect(), await bookie.connect()
        assert await other.add(add(1, 0)) == [OK]
        await victim.send(add(1, 1), damage(add(1, 2)))
        with pytest.raises(StreamClosed, match="FrameDamaged") as closed:
            await victim.stream.receive()
        assert not closed.value.clean
        assert await other.add(add(1, 1)) == [OK]
        again = await bookie.connect()
        assert await again.add(add(1, 2)) == [OK]
        assert await bookie.read(read_request(0, 2)) == some(0, 1, 2)


async def test_a_damaged_frame_creates_no_record_of_a_new_ledger() -> None:
    async with running_bookie() as bookie:
        victim = await bookie.connect()
        await victim.send(add(1, 0), add(1, 1)[:-1])
        with pytest.raises(StreamClosed):
            await victim.stream.receive()
        assert bookie.storage.sequence() == 0
        assert await (await bookie.connect()).add(add(1, 0)) == [OK]
        assert bookie.storage.ledger_record(1) is not None


async def test_entries_of_a_writer_that_disconnects_are_kept() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        bookie.sync_thread.open = False
        await writer.send(add(1, 0))
        await wait_until(lambda: bookie.sync_thread.held)
        await writer.stream.close()
        await wait_until(lambda: not bookie.service._streams)
        bookie.sync_thread.release()
        assert await bookie.read(read_request(0, 0)) == some(0)


async def test_a_stream_is_not_read_while_too_much_is_pending() -> None:
    async with running_bookie(pending_bytes_max=10_000) as bookie:
        writer = await bookie.connect(frames_max=1)
        bookie.sync_thread.open = False
        payload = bytes(1000)
        sent = 0

        async def send() -> None:
            nonlocal sent
            for entry in range(60):
                await writer.send(add(1, entry, payload))
                sent += 1

        async with asyncio.TaskGroup() as group:
            acks = group.create_task(writer.acks(60))
            group.create_task(send())
            await settle(300)
            # 10,000 bytes, the frame that exceeded them, and the frames that wait in the stream
            assert 9 <= bookie.storage.sequence() - 1 <= 11
            assert sent <= 13
            assert bookie.commit.pending_bytes <= 10_000 + 1100
            bookie.sync_thread.open = True
            bookie.sync_thread.release()
        assert [code for *_, code in acks.result()] == [OK] * 60


async def test_a_failed_sync_acknowledges_nothing() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        bookie.storage.failing["sync"] = StorageFailed("sync", "Input/output error")
        await writer.send(add(1, 0))
        await wait_until(lambda: bookie.deaths)
        async with asyncio.TaskGroup() as group:
            acks = group.create_task(writer.acks(1))
            await settle()
            assert not acks.done()
            acks.cancel()


async def test_a_failed_write_acknowledges_nothing_and_ends_the_stream() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        await writer.add(add(1, 0))
        bookie.storage.failing["write"] = StorageFailed("write", "No space left on device")
        await writer.send(add(1, 1))
        with pytest.raises(StreamClosed, match="No space left on device"):
            await writer.stream.receive()
        assert len(bookie.deaths) == 1


# -- The rest ----------------------------------------------------------------------------------


async def test_lists_come_in_pages() -> None:
    async with running_bookie() as bookie:
        service = bookie.service
        writer = await bookie.connect()
        await writer.add(*(add(ledger, 0) for ledger in (1, 2, 7)))
        page = await service.list_ledgers(INCARNATION, after=-1, ledgers_max=2)
        assert (page.code, page.ledgers, page.more) == (OK, (1, 2), True)
        page = await service.list_ledgers(INCARNATION, after=2, ledgers_max=2)
        assert (page.code, page.ledgers, page.more) == (OK, (7,), False)
        await writer.add(*(add(9, entry) for entry in (0, 1, 2, 5, 6, 9)))
        entries = await service.list_entries(INCARNATION, ledger=9, first=0, entries_max=0)
        assert entries.runs == (EntryRun(0, 3), EntryRun(5, 2), EntryRun(9, 1))
        assert not entries.more
        entries = await service.list_entries(INCARNATION, ledger=9, first=1, entries_max=3)
        assert (entries.runs, entries.more) == ((EntryRun(1, 2), EntryRun(5, 1)), True)
        entries = await service.list_entries(INCARNATION, ledger=10, first=0, entries_max=0)
        assert entries.code is BookieCode.NO_SUCH_LEDGER
        entries = await service.list_entries(INCARNATION, ledger=-1, first=0, entries_max=0)
        assert entries.code is BookieCode.BAD_REQUEST
        for other in (
            await service.list_ledgers(OTHER, after=-1, ledgers_max=0),
            await service.list_entries(OTHER, ledger=9, first=0, entries_max=0),
        ):
            assert other.code is BookieCode.WRONG_INCARNATION


async def test_stopping_acknowledges_what_was_written_and_refuses_the_rest_as_unknown() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        bookie.sync_thread.open = False
        await writer.send(add(1, 0))
        await wait_until(lambda: bookie.sync_thread.held)
        async with asyncio.TaskGroup() as group:
            group.create_task(bookie.service.stop(grace_s=60))
            await wait_until(lambda: bookie.service.state is State.STOPPING)
            await writer.send(add(1, 1))
            assert await writer.acks(1) == [(1, 1, BookieCode.STOPPING)]
            assert bookie.service.counts.adds_refused == 1
            assert await bookie.read(read_request(0, 0)) == [none(0, BookieCode.STOPPING)]
            late = await bookie.connect()
            assert late.reply is not None
            assert late.reply.code is BookieCode.STOPPING
            bookie.sync_thread.open = True
            bookie.sync_thread.release()
            assert await writer.acks(1) == [(1, 0, OK)]
        with pytest.raises(StreamClosed):
            await writer.stream.receive()
        assert bookie.storage.entry(1, 1) is None


async def test_a_writer_that_disconnects_during_a_stop_does_not_break_it() -> None:
    async with running_bookie() as bookie:
        service = bookie.service
        slow, leaving = await bookie.connect(frames_max=1), await bookie.connect()
        for entry in range(3):  # one frame of acks each; the stream takes one frame
            await slow.send(add(1, entry))
            await wait_until(lambda stored=entry + 1: service.counts.adds_stored == stored)
            await bookie.commit.wait_durable()
        async with asyncio.TaskGroup() as group:
            group.create_task(service.stop(grace_s=60))
            await wait_until(lambda: service.state is State.STOPPING)
            await settle()
            await leaving.stream.close()
            await wait_until(lambda: len(service._streams) == 1)
            assert await slow.acks(3) == [(1, entry, OK) for entry in range(3)]


async def test_stopping_ends_within_its_grace_although_the_disk_hangs() -> None:
    async with running_bookie() as bookie:
        writer = await bookie.connect()
        bookie.sync_thread.open = False
        await writer.send(add(1, 0))
        await wait_until(lambda: bookie.sync_thread.held)
        await bookie.service.stop(grace_s=0.01)
        with pytest.raises(StreamClosed):
            await writer.stream.receive()


async def test_info_returns_the_identity_and_the_state() -> None:
    async with running_bookie(storage=FaultyStorage()) as bookie:
        info = bookie.service.info()
        assert (info.bookie, info.cluster, info.incarnation) == ("b1", "c1", INCARNATION)
        assert (info.boot_epoch, info.state) == (3, "serving")
