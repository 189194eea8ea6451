"""The bookie's service through its data port: the purposes of connections, their ends and
limits."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from fakes.bookies import IDENTITY, INCARNATION, KEY, OTHER, Bookie, add, envelope, running_bookie
from fakes.data_port import ask, connect, read, reads, served
from support import settle

from magnetar.bookie.contract import ReadRequest
from magnetar.bookie.ledger.connection import IDLE_READS_MAX, READS_MAX, RemoteBookiePeer
from magnetar.bookie.ledger.errors import BookieUnavailable
from magnetar.metadata.model import BookieId, Member
from magnetar.protos import bookie_pb2 as pb
from magnetar.protos.envelope import (
    BEAT,
    ENTRY_BYTES_MAX,
    BookieCode,
    ReadAnswer,
    decode_read_answers,
)
from magnetar.runtime.errors import StreamClosed
from magnetar.runtime.tcp_frames import connect_frames

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from magnetar.metadata.model import BookieAddress
    from magnetar.runtime.frames import Buffer, FrameStream

pytestmark = pytest.mark.real_loop

OK = BookieCode.OK
MEMBER = Member(BookieId("b1"), INCARNATION)


@asynccontextmanager
async def bookie_on_ports() -> AsyncIterator[tuple[Bookie, BookieAddress]]:
    async with running_bookie() as bookie, served(bookie.service) as address:
        yield bookie, address


@asynccontextmanager
async def peer_with_entries(count: int, size: int) -> AsyncIterator[RemoteBookiePeer]:
    """The peer of a bookie that stores entries 0 … count-1 of ledger 1."""
    async with bookie_on_ports() as (_, address):
        writer = await connect(address.data, INCARNATION)
        for entry in range(count):
            assert await writer.add(add(1, entry, bytes(size))) == [OK]
        await writer.stream.close()
        peer = RemoteBookiePeer(MEMBER, address)
        yield peer
        await peer.close()


def request_of(first: int, last: int) -> ReadRequest:
    return ReadRequest(incarnation=INCARNATION, ledger=1, master_key=KEY, first=first, last=last)


async def entries(peer: RemoteBookiePeer, first: int, last: int) -> list[int]:
    frames = [frame async for frame in peer.read(request_of(first, last))]
    return [answer.entry for frame in frames for answer in decode_read_answers(frame)]


async def test_entries_of_every_size_are_stored_and_read() -> None:
    async with bookie_on_ports() as (_, address):
        writer = await connect(address.data, INCARNATION)
        assert writer.reply == (OK, INCARNATION, IDENTITY.boot_epoch)
        payloads = [b"", b"x", bytes(100_000), bytes(ENTRY_BYTES_MAX), b"last"]
        for entry, payload in enumerate(payloads):
            assert await writer.add(add(1, entry, payload)) == [OK]
        answers = await read(
            address.data,
            pb.ReadRequest(incarnation=INCARNATION, ledger=1, master_key=KEY, first=0, last=99),
        )
        stored = [envelope(1, entry, payload) for entry, payload in enumerate(payloads)]
        assert [answer.envelope for answer in answers[:-1]] == stored
        assert answers[-1] == (5, BookieCode.NO_SUCH_ENTRY, b"")
        await writer.stream.close()


async def test_a_too_large_entry_is_refused_and_the_stream_continues() -> None:
    async with bookie_on_ports() as (_, address):
        writer = await connect(address.data, INCARNATION)
        code = await writer.add(add(1, 0, bytes(ENTRY_BYTES_MAX + 1)))
        assert code == [BookieCode.TOO_LARGE]
        assert await writer.add(add(1, 0)) == [OK]
        await writer.stream.close()


async def test_a_damaged_frame_ends_its_stream_with_the_reason_and_no_other() -> None:
    async with bookie_on_ports() as (_, address):
        victim = await connect(address.data, INCARNATION)
        other = await connect(address.data, INCARNATION)
        await victim.send(add(1, 0)[:-1])
        with pytest.raises(StreamClosed, match=r"FrameDamaged.*bytes"):
            await victim.stream.receive()
        assert await other.add(add(1, 0)) == [OK]
        await other.stream.close()


async def test_another_incarnation_is_refused() -> None:
    async with bookie_on_ports() as (_, address):
        other = "e" * 32
        writer = await connect(address.data, other)
        assert writer.reply is not None
        assert writer.reply.code is BookieCode.WRONG_INCARNATION
        answers = await read(address.data, pb.ReadRequest(incarnation=other, ledger=1, last=1))
        assert answers == [(0, BookieCode.WRONG_INCARNATION, b"")]


async def test_the_limits_of_a_read_are_passed_on() -> None:
    async with bookie_on_ports() as (_, address):
        writer = await connect(address.data, INCARNATION)
        await writer.add(*(add(1, entry) for entry in range(5)))
        for limits, count in (({"max_bytes": 1}, 1), ({"max_entries": 2}, 2)):
            request = pb.ReadRequest(
                incarnation=INCARNATION, ledger=1, master_key=KEY, last=4, **limits
            )
            assert len(await read(address.data, request)) == count
        await writer.stream.close()


async def test_an_undecodable_request_is_refused_and_the_connection_continues() -> None:
    async with bookie_on_ports() as (_, address), reads(address.data) as stream:
        for _ in range(2):
            answers = await ask(stream, b"\xff\xff\xff")
            assert answers == [ReadAnswer(-1, BookieCode.BAD_REQUEST, b"")]
        request = pb.ReadRequest(incarnation=INCARNATION, ledger=1, master_key=KEY, last=0)
        assert await ask(stream, request) == [(0, BookieCode.NO_SUCH_LEDGER, b"")]


@pytest.mark.parametrize("first", [b"\x00", b"\x04", b"\x01\x01", b"GET / HTTP/1.1\r\n"])
async def test_a_connection_without_a_known_purpose_is_ended_by_name(first: bytes) -> None:
    async with bookie_on_ports() as (_, address):
        stream = await connect_frames(address.data)
        await stream.send([first])
        with pytest.raises(StreamClosed, match="the first frame names no purpose"):
            await stream.receive()
        await stream.close()


async def test_a_bug_in_the_service_ends_only_its_stream() -> None:
    class Buggy:
        async def handle_write(self, stream: FrameStream) -> None:
            await stream.receive()
            raise ValueError("unexpected")

    async with served(Buggy()) as address:  # type: ignore[arg-type]
        stream = await connect_frames(address.data)
        await stream.send([b"\x01"])
        await stream.send([b"hello"])
        with pytest.raises(StreamClosed, match="internal error"):
            await stream.receive()
        await stream.close()


# -- the peer's connections ------------------------------------------------------------------------


async def test_a_completed_read_leaves_its_connection_for_the_next_read() -> None:
    async with peer_with_entries(3, 10) as peer:
        assert await entries(peer, 0, 2) == [0, 1, 2]
        [kept] = peer._idle_reads
        assert await entries(peer, 1, 1) == [1]
        assert peer._idle_reads == [kept]


async def test_a_read_that_is_left_early_ends_its_connection_and_no_other_read() -> None:
    async with peer_with_entries(20, 400_000) as peer:
        async with aclosing(peer.read(request_of(0, 19))) as left:  # type: ignore[type-var]
            assert await anext(left)
            async with aclosing(peer.read(request_of(0, 19))) as other:  # type: ignore[type-var]
                found = [await anext(other)]
                await left.aclose()
                found += [frame async for frame in other]
        answers = [answer.entry for frame in found for answer in decode_read_answers(frame)]
        assert answers == list(range(20))
        assert len(peer._idle_reads) == 1


async def test_cancelling_a_read_ends_no_other_read_and_no_add() -> None:
    async with peer_with_entries(10, 400_000) as peer:
        writer = await peer.open_write("test")
        async with asyncio.TaskGroup() as group:
            victims = [group.create_task(entries(peer, 0, 9)) for _ in range(3)]
            other = group.create_task(entries(peer, 0, 9))
            await settle()
            for victim in victims:
                victim.cancel()
        assert await other == list(range(10))
        assert await entries(peer, 9, 9) == [9]
        await writer.send([add(1, 10)])
        assert await writer.receive()
        await writer.close()


async def test_reads_beyond_the_limit_wait_and_all_are_answered() -> None:
    async with peer_with_entries(2, 10) as peer, asyncio.TaskGroup() as group:
        asking = [group.create_task(entries(peer, 0, 1)) for _ in range(3 * READS_MAX)]
        while not all(task.done() for task in asking):
            assert len(peer._reads) <= READS_MAX
            await asyncio.sleep(0)
        assert [task.result() for task in asking] == [[0, 1]] * len(asking)
        assert len(peer._idle_reads) <= IDLE_READS_MAX


async def test_a_connection_that_ended_while_idle_is_not_used() -> None:
    async with peer_with_entries(2, 10) as peer:
        await entries(peer, 0, 1)
        [idle] = peer._idle_reads
        idle.abort("lost")
        assert await entries(peer, 0, 1) == [0, 1]
        assert idle not in peer._idle_reads


async def test_closing_a_peer_ends_its_streams_and_reads() -> None:
    async with peer_with_entries(20, 400_000) as peer:
        writer = await peer.open_write("test")
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(until_closed(writer))
            async with aclosing(peer.read(request_of(0, 19))) as reading:  # type: ignore[type-var]
                assert await anext(reading)
                await peer.close()
                with pytest.raises(StreamClosed):
                    await drained(reading)
            assert (await waiting).clean


async def drained(frames: AsyncIterator[Buffer]) -> None:
    async for _ in frames:
        pass


async def until_closed(stream: FrameStream) -> StreamClosed:
    try:
        while True:
            await stream.receive()
    except StreamClosed as closed:
        return closed


async def test_a_connection_to_an_absent_bookie_raises_stream_closed() -> None:
    async with bookie_on_ports() as (_, address):
        peer = RemoteBookiePeer(MEMBER, address)
    with pytest.raises(StreamClosed, match="cannot connect"):
        await peer.open_write("test")
    with pytest.raises(StreamClosed, match="cannot connect"):
        await entries(peer, 0, 0)
    await peer.close()


async def test_acks_do_not_wait_behind_a_read_whose_client_does_not_receive() -> None:
    async with peer_with_entries(20, 400_000) as peer:
        frames: list[Buffer] = []
        async with aclosing(peer.read(request_of(0, 19))) as reading:  # type: ignore[type-var]
            frames.append(await anext(reading))  # the reader takes no more: its connection fills up
            writer = await peer.open_write("test")
            await writer.send([add(1, 20)])
            assert await writer.receive()
            await writer.close()


async def test_the_bookie_reports_the_last_beat_of_a_broker() -> None:
    async with bookie_on_ports() as (_, address):
        peer = RemoteBookiePeer(MEMBER, address)
        assert await peer.last_heard("broker", OTHER) is None
        stream = await peer.open_presence("broker", OTHER)
        await asyncio.sleep(0.3)
        before = await peer.last_heard("broker", OTHER)
        sent_s = asyncio.get_running_loop().time()
        await stream.send([BEAT])
        assert await stream.receive() == BEAT
        after = await peer.last_heard("broker", OTHER)
        assert before is not None
        assert after is not None
        assert before.heard_s >= 0.299
        assert after.heard_s <= asyncio.get_running_loop().time() - sent_s
        assert after.listening_s >= 0.3
        assert await peer.last_heard("broker", INCARNATION) is None
        await peer.close()


async def test_another_incarnation_of_the_bookie_does_not_answer_about_brokers() -> None:
    async with bookie_on_ports() as (_, address):
        await RemoteBookiePeer(MEMBER, address).open_presence("broker", OTHER)
        peer = RemoteBookiePeer(Member(MEMBER.bookie, OTHER), address)
        with pytest.raises(BookieUnavailable, match="WRONG_INCARNATION"):
            await peer.last_heard("broker", OTHER)
        await peer.close()


async def test_a_frame_that_is_no_beat_ends_a_presence_stream() -> None:
    async with bookie_on_ports() as (_, address):
        stream = await RemoteBookiePeer(MEMBER, address).open_presence("broker", OTHER)
        await stream.send([b"\1\1"])
        with pytest.raises(StreamClosed, match="not a beat"):
            await stream.receive()
